// The official TypeScript client: lists the tools, calls them, and says as JSON what it was told.
import { pathToFileURL } from "node:url";

const [modules, url] = process.argv.slice(2);
const sdk = (path) => import(pathToFileURL(`${modules}/@modelcontextprotocol/sdk/dist/esm/client/${path}.js`));
const { Client } = await sdk("index");
const { StreamableHTTPClientTransport } = await sdk("streamableHttp");

const client = new Client({ name: "test", version: "1" });
const transport = new StreamableHTTPClientTransport(new URL(url));
await client.connect(transport);
const tools = (await client.listTools()).tools.map((tool) => tool.name);
const said = await client.callTool({ name: "echo_message", arguments: { message: "hi" } });
const counted = await client.callTool({ name: "echo_with_length", arguments: { message: "hello" } });
const unknown = await client.callTool({ name: "nope", arguments: {} }).catch((error) => error.code);
await transport.terminateSession();
await client.close();
console.log(JSON.stringify({
  tools, said: said.content, structured: counted.structuredContent, unknown,
}));

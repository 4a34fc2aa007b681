/** One visitor's own session with the served environment, over the same WebSocket that every client uses. */

/** @typedef {{at: number, sent: boolean, text: string}} Frame */

/** A refused request. `problems` name the fields, where the server did. */
export class Refused extends Error {
  /** @param {any} data of the error frame */
  constructor(data) {
    super(data.message ?? "The server refused.");
    this.hint = data.hint ?? "";
    this.code = data.code ?? "";
    /** @type {{path: string[], message: string}[]} */
    this.problems = (data.errors ?? []).map((/** @type {any} */ error) => ({ path: (error.loc ?? []).map(String), message: error.msg ?? "is not valid" }));
  }
}

export class EnvironmentSession {
  /** @param {(frame: Frame) => void} onFrame @param {(state: string) => void} onState */
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState;
    /** @type {WebSocket | null} */
    this.socket = null;
    /** The connection that is open or being opened, shared by all requests. @type {Promise<WebSocket> | null} */
    this.connection = null;
    /** @type {Map<number, {resolve: (data: any) => void, reject: (error: Error) => void}>} */
    this.waiting = new Map();
    this.number = 0;
  }

  /** @returns {Promise<WebSocket>} */
  open() {
    if (this.connection) return this.connection;
    this.onState("connecting");
    this.connection = new Promise((resolve, reject) => {
      const url = new URL("../ws", location.href);
      url.protocol = url.protocol.replace("http", "ws");
      url.hash = "";
      const socket = new WebSocket(url);
      this.socket = socket;
      socket.onopen = () => {
        this.onState("connected");
        resolve(socket);
      };
      socket.onmessage = (event) => this.take(String(event.data));
      socket.onclose = (event) => {
        this.onState("closed");
        this.connection = null;
        const reason = event.code === 1013 ? "The server is full: all its sessions are taken." : `The connection ended (${event.code}${event.reason ? `, ${event.reason}` : ""}).`;
        reject(new Refused({ message: reason, hint: "Reset opens a new session." }));
        for (const { reject: refuse } of this.waiting.values()) refuse(new Refused({ message: reason, hint: "Reset opens a new session." }));
        this.waiting.clear();
      };
    });
    return this.connection;
  }

  /** @param {string} type @param {any} [data] @returns {Promise<any>} */
  async ask(type, data) {
    const socket = await this.open();
    const id = ++this.number;
    const text = JSON.stringify(data === undefined ? { type, id } : { type, data, id });
    this.onFrame({ at: Date.now() / 1000, sent: true, text });
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      socket.send(text);
    });
  }

  /** @param {string} text */
  take(text) {
    this.onFrame({ at: Date.now() / 1000, sent: false, text });
    const message = JSON.parse(text);
    const id = message.id ?? [...this.waiting.keys()][0];
    const pending = this.waiting.get(id);
    if (!pending || message.type === "queued") return;
    this.waiting.delete(id);
    if (message.type === "error") pending.reject(new Refused(message.data ?? {}));
    else pending.resolve(message.data);
  }

  close() {
    this.socket?.close(1000);
  }
}

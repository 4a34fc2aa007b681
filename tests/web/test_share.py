"""One rollout as one file: nothing in it runs but our own modules, and they find all their answers in it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paddock.web.responses import PageError
from paddock.web.share import bundle, escape_json
from paddock.web.static_files import Assets

from .browser import Browser

NODE = shutil.which("node")


def file_of(browser: Browser, rollout_id: str) -> str:
    answer = browser.get(f"/web/api/rollouts/{rollout_id}/share")
    assert answer.status == 200
    assert answer.headers["content-disposition"] == f'attachment; filename="{rollout_id}.html"'
    return answer.body.decode()


def data_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="paddock-data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def test_the_file_has_all_answers(browser: Browser, ids: dict[str, str]) -> None:
    name = ids["compact"]
    data = data_of(file_of(browser, name))
    answers = data["answers"]
    assert data["id"] == name
    assert data["left_out"] == []
    assert answers[f"rollouts/{name}/transcript"]["items"] == browser.api(f"rollouts/{name}/transcript")["items"]
    assert answers[f"rollouts/{name}/calls"] == browser.api(f"rollouts/{name}/calls")
    for call in answers[f"rollouts/{name}/calls"]["calls"]:
        place = f"rollouts/{name}/calls/{call['id']}"
        assert answers[f"{place}/tokens/completion"] == browser.api(f"{place}/tokens?part=completion")
        prompt = answers[f"{place}/tokens/prompt"]
        assert prompt["offset"] == call["shared_tokens"]
        assert len(prompt["ids"]) == call["prompt_tokens"] - call["shared_tokens"]
        assert answers[place]["message"] == browser.api(place)["message"]
    assert answers["about"]["parts"]["rollouts"] is True
    assert answers["about"]["store"] is None


def test_hostile_text_stays_text(browser: Browser, ids: dict[str, str]) -> None:
    page = file_of(browser, ids["hostile"])
    assert page.count("<script") == page.count("</script>") == 2
    assert "onerror=" not in page.replace("\\u003c", "").split("paddock-data")[0]
    texts = [
        item.get("text", "") for item in data_of(page)["answers"][f"rollouts/{ids['hostile']}/transcript"]["items"]
    ]
    assert any(text.startswith("<script>") for text in texts)


def test_only_our_own_code_is_allowed(browser: Browser, ids: dict[str, str]) -> None:
    page = file_of(browser, ids["solve"])
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    [script] = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for part in (script, style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy
    assert "unsafe" not in policy


def test_the_same_rollout_makes_the_same_modules() -> None:
    modules = {name: asset.content.decode() for name, asset in Assets().all().items() if name.endswith(".js")}
    entry = "js/main.js"
    assert bundle(modules, entry) == bundle(dict(reversed(modules.items())), entry)
    assert not re.findall(r"^(?:import|export)\b", bundle(modules, entry), re.MULTILINE)


@pytest.mark.parametrize("text", ["</script>", "<!--", "<script>", "]]>", "\u2028", "&lt;", "\ud800"])
def test_data_ends_no_element(text: str) -> None:
    written = escape_json({"text": text})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"text": text}


MODULES = {
    "js/main.js": (
        'import start, { twice as double, Thing } from "./deep/maths.js";\n'
        'import * as words from "./words.js";\n'
        'import "./words.js";\n'
        'import {\n  count,\n  add,\n} from "./state.js";\n'
        "add(); add();\n"
        'console.log(double(start), new Thing().name, words.hello, count, words.default("x"), "</script>".length);\n'
    ),
    "js/deep/maths.js": (
        'export { hello as greeting } from "../words.js";\n'
        "export async function later() {}\n"
        "export function twice(x) { return 2 * x; }\n"
        "export class Thing { name = 'thing'; }\n"
        "export default 21;\n"
    ),
    "js/words.js": 'const hello = "hello";\nexport { hello };\nexport default (x) => `<${x}>`;\n',
    "js/state.js": "export let count = 0;\nexport const add = () => { count += 1; };\n",
}


def test_modules_become_one() -> None:
    joined = bundle(MODULES, "js/main.js")
    assert "</script" not in joined
    assert joined.index("js/words.js") < joined.index("js/main.js")


@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_the_one_does_what_the_modules_do(tmp_path: Path) -> None:
    for name, source in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "joined.js").write_text(bundle(MODULES, "js/main.js"))
    assert NODE is not None
    apart, joined = (
        subprocess.run([NODE, str(tmp_path / name)], capture_output=True, text=True, timeout=20, check=True).stdout
        for name in ("js/main.js", "joined.js")
    )
    assert joined.startswith("42 thing hello")
    # A constant stands for what is imported, so a number that changes later is the one difference.
    assert joined == apart.replace("hello 2", "hello 0")


def test_a_circle_is_refused() -> None:
    circle = {"js/a.js": 'import { b } from "./b.js";\n', "js/b.js": 'import { a } from "./a.js";\n'}
    with pytest.raises(PageError, match="circle"):
        bundle(circle, "js/a.js")
    with pytest.raises(PageError, match="not there"):
        bundle({"js/a.js": 'import { b } from "./none.js";\n'}, "js/a.js")

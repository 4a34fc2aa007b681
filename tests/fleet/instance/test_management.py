import pytest

from .instances import MANAGER, TOKEN, Instance

QUERY = f"{MANAGER}/resources/sqlite/current/query"


@pytest.mark.parametrize("prefix", ["/api/v1/env", "/notes/api/v1/env", "/crm/api/v1/env"])
def test_every_app_name_reaches_the_same_api(notes: Instance, prefix: str) -> None:
    health = notes.ask("GET", f"{prefix}/health").json
    assert health.keys() == {"status", "timestamp", "service"}
    assert health["service"] == "notes"


def test_a_reset_brings_back_the_seed_and_begins_an_episode(notes: Instance) -> None:
    notes.call("add_note", title="mine")
    notes.post(QUERY, {"query": "DELETE FROM notes WHERE id = 1", "read_only": False})
    assert notes.titles() == ["mine"]
    answer = notes.post(f"{MANAGER}/reset", {"seed": 3, "timestamp": None})
    assert answer["success"]
    assert answer["message"]
    assert notes.titles() == ["welcome"]


def test_a_reset_needs_no_arguments_and_refuses_invalid_ones(notes: Instance) -> None:
    assert notes.ask("POST", f"{MANAGER}/reset", b"").json["success"]
    assert notes.ask("POST", f"{MANAGER}/reset", {"seed": "x"}).status == 400
    assert notes.ask("POST", f"{MANAGER}/reset", b"{").status == 400
    refused = notes.ask("POST", f"{MANAGER}/reset", [1])
    assert isinstance(refused.json["detail"], str)


def test_even_a_dropped_table_comes_back(notes: Instance) -> None:
    assert notes.post(QUERY, {"query": "DROP TABLE notes", "read_only": False})["success"]
    assert notes.call("list_notes")["result"]["isError"]
    assert notes.post(f"{MANAGER}/reset")["success"]
    assert notes.titles() == ["welcome"]


def test_the_resources_are_listed(notes: Instance) -> None:
    response = notes.ask("GET", f"{MANAGER}/resources").json
    assert [(one["name"], one["type"], one["mode"]) for one in response] == [
        ("seed", "sqlite", "ro"),
        ("current", "sqlite", "rw"),
    ]


def test_a_database_is_described(notes: Instance) -> None:
    response = notes.ask("GET", f"{MANAGER}/resources/sqlite/current/describe").json
    assert response["resource_name"] == "current"
    columns = {column["name"]: column for column in response["tables"][0]["columns"]}
    assert [columns[name]["pk"] for name in ("id", "title", "body")] == [1, 0, 0]
    assert all(column.keys() == {"name", "type", "notnull", "default_value", "pk"} for column in columns.values())


def test_queries_are_read_only_by_default(notes: Instance) -> None:
    written = {"query": "INSERT INTO notes (title) VALUES (?)", "args": ["sql"]}
    refused = notes.ask("POST", QUERY, written)
    assert refused.status == 200
    assert not refused.json["success"]
    assert "readonly" in refused.json["error"]
    assert notes.post(QUERY, {**written, "read_only": False})["last_insert_id"] == 2
    assert notes.titles() == ["welcome", "sql"]


def test_wrong_sql_is_a_200_with_an_error(notes: Instance) -> None:
    answer = notes.ask("POST", QUERY, {"query": "SELEC 1"})
    assert answer.status == 200
    assert not answer.json["success"]
    assert "syntax" in answer.json["error"]
    huge = notes.ask("POST", QUERY, {"query": "SELECT ?", "args": [2**70]})
    assert (huge.status, huge.json["success"]) == (200, False)


def test_a_query_must_be_valid(notes: Instance) -> None:
    assert notes.ask("POST", QUERY, {"query": 1}).status == 400
    assert notes.ask("POST", QUERY, {"query": "SELECT 1", "args": "x"}).status == 400
    assert notes.ask("POST", f"{MANAGER}/resources/sqlite/other/query", {"query": "SELECT 1"}).status == 404


def test_the_difference_has_the_documented_shape(notes: Instance) -> None:
    notes.call("add_note", title="new", body="b")
    notes.post(QUERY, {"query": "UPDATE notes SET title = 'changed' WHERE id = 1", "read_only": False})
    answer = notes.post(f"{MANAGER}/diff/structured", {"ignore_config": {"tables": [], "fields": ["body"]}})
    assert answer["success"]
    assert answer["diff"]["notes"] == {
        "table_name": "notes",
        "primary_key": ["id"],
        "added_rows": [{"row_id": 2, "data": {"id": 2, "title": "new"}}],
        "removed_rows": [],
        "modified_rows": [
            {
                "row_id": 1,
                "changes": {"title": {"before": "welcome", "after": "changed"}},
                "data": {"id": 1, "title": "changed"},
            }
        ],
        "unchanged_count": 0,
        "total_changes": 2,
    }


@pytest.mark.parametrize("config", [[], {"tables": 3}, {"table_fields": ["x"]}, {"fields": [[1]]}])
def test_a_wrong_ignore_config_is_refused(notes: Instance, config: object) -> None:
    assert notes.ask("POST", f"{MANAGER}/diff/structured", {"ignore_config": config}).status == 400


def test_files_browser_and_old_verifiers_are_answered_as_missing(notes: Instance) -> None:
    files = notes.post(f"{MANAGER}/diff/fs")
    assert (files["success"], files["files"], files["total_files"], files["source"]) == (True, [], 0, "none")
    assert notes.post(f"{MANAGER}/fs/file", {"path": "/x"})["exists"] is False
    assert notes.ask("POST", f"{MANAGER}/fs/file/text", {"path": "/x"}).status == 400
    described = notes.ask("GET", f"{MANAGER}/resources/cdp/describe")
    assert (described.status, described.json["success"], described.json["cdp_browser_url"]) == (200, False, "")
    assert "image_type" in notes.post(f"{MANAGER}/resources/cdp/start", {"resolution": "1,1"})["message"]
    old = notes.post(f"{MANAGER}/execute_verifier_function", {"function_code": "", "function_name": "f"})
    assert not old["success"]
    assert "/v1/verifiers/execute" in old["error"]


def test_other_paths_say_in_json_that_they_are_not_there(notes: Instance) -> None:
    for path in ("/raw/ping", f"{MANAGER}/nothing", "/a/b/api/v1/env/health", "/nothing"):
        answer = notes.ask("GET", path)
        assert answer.status == 404
        assert isinstance(answer.json["detail"], str)
    assert notes.ask("GET", f"{MANAGER}/reset").status == 405


def test_requests_from_other_origins_are_refused(notes: Instance) -> None:
    assert notes.ask("POST", f"{MANAGER}/reset", {}, origin="http://evil.example").status == 403
    assert notes.ask("GET", f"{MANAGER}/health", host="evil.example").status == 403


def test_without_the_runner_token_there_is_nothing(locked: Instance) -> None:
    for path in (f"{MANAGER}/health", "/api/v1/env/health", "/api/v1/env"):
        assert locked.ask("GET", path).status == 404
    assert locked.ask("GET", f"{MANAGER}/health", x_runner_token="wrong").status == 404
    assert locked.ask("GET", f"{MANAGER}/health", x_runner_token=TOKEN).status == 200


def test_the_runner_token_opens_no_tools(locked: Instance) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list_notes"}}
    assert locked.ask("POST", "/mcp", call, x_runner_token=TOKEN).status == 401

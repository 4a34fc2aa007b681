"""The real Fleet client on a plane. Usage: fleet_sync.py URL KEY SCENARIO|all"""

import asyncio
import contextlib
import os
import sys
import time
from typing import Any

from fleet.tasks import Task
from fleet_parts import VERIFIER, chosen, inject, told, use_tools
from report import report

import fleet
from fleet import Fleet


def caught(work: Any) -> list[Any]:
    try:
        # The client prints while it judges; standard output is for the report here.
        with contextlib.redirect_stdout(sys.stderr):
            return ["no error", str(work())]
    except Exception as error:
        return told(error)


def verify(task: Any, env: Any, **arguments: Any) -> float:
    """The client prints what a verifier prints."""
    with contextlib.redirect_stdout(sys.stderr):
        score: float = task.verify(env, **arguments)
    return score


def whole_sequence(url: str, key: str) -> Any:
    client = Fleet(api_key=key, base_url=url)
    began = time.monotonic()
    env = client.make("notes:v2", run_id="whole", ttl_seconds=120, heartbeat_interval=60)
    seconds = time.monotonic() - began
    reset = env.reset(seed=1)
    tools = asyncio.run(use_tools(env.mcp.url, key))
    env.instance.load()
    rows = env.db("current").query("SELECT title FROM notes ORDER BY id").rows
    task = Task(key="whole", prompt="p", env_id="notes", verifier_func=VERIFIER, verifier_id="x")
    graded = task.verify_detailed(env, final_answer="done")
    again = verify(task, env, final_answer="no")
    env.reset()
    after_reset = env.db("current").query("SELECT count(*) FROM notes").rows
    other_app = env.app("crm").manager_health_check().status
    beat = env.heartbeat()
    result = client.instance(env.instance_id)
    closed = env.close()
    return {
        "made": [env.env_key, env.version, env.status, seconds < 5],
        "reset": reset.success,
        "tools": tools,
        "rows": rows,
        "graded": [graded.success, graded.result, graded.stdout, bool(graded.execution_id)],
        "again": again,
        "after_reset": after_reset,
        "other_app": other_app,
        "beat": [beat.success, beat.interval_seconds],
        "found": result.status,
        "closed": closed.status,
        "closed_twice": caught(env.close),
        "verified_when_closed": caught(lambda: verify(task, env, final_answer="done")),
    }


def listing(url: str, key: str) -> Any:
    client = Fleet(api_key=key, base_url=url)
    env = client.make("echo", run_id="listing")
    answer = {
        "envs": [each.env_key for each in client.list_envs()],
        "environment": [client.environment("notes").default_version, list(client.environment("notes").versions)],
        "regions": client.list_regions(),
        "instances": [each.instance_id == env.instance_id for each in client.instances(run_id="listing")],
        "runs": [(run.run_id, run.running_count) for run in client.list_runs() if run.run_id == "listing"],
        "account": client.account().instance_limit,
    }
    answer["closed_all"] = [closed.status for closed in client.close_all(run_id="listing")]
    answer["left"] = [each.status for each in client.instances(run_id="listing", status="running")]
    return answer


def module_functions(url: str, key: str) -> Any:
    os.environ.update(FLEET_BASE_URL=url, FLEET_API_KEY=key)
    env = fleet.env.make("echo")
    return [env.status, env.close().status]


def tasks(url: str, key: str) -> Any:
    client = Fleet(api_key=key, base_url=url)
    task = Task(key="milk", prompt="Note milk.", env_id="notes", version="v1", verifier_func=VERIFIER)
    imported = client.import_single_task(task, project_key="p")
    loaded = client.load_tasks(keys=["milk"])[0]
    env = client.make_for_task(loaded)
    asyncio.run(use_tools(env.mcp.url, key))
    score = verify(loaded, env, final_answer="done")
    env.close()
    updated = client.update_task("milk", prompt="Note milk, please.")
    return {
        "imported": imported.status_code,
        "loaded": [loaded.key, loaded.env_id, loaded.version, loaded.verifier_func == VERIFIER],
        "by_project": [each.key for each in client.load_tasks(project_key="p")],
        "score": score,
        "got": [client.get_task("milk").prompt, updated.verifier.version],
    }


def traces(url: str, key: str) -> Any:
    client = Fleet(api_key=key, base_url=url)
    job = client.trace_job("nightly")
    session = client.start_session(job_id=job, model="m", task_key="milk")
    history = [{"role": "user", "content": "hi"}]
    session.log(history, {"role": "assistant", "content": "hello"})
    history += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]
    session.log(history, "goodbye")
    session.complete()
    listed = client.list_job_sessions(job)
    created = client.create_session(model="m2", initial_message={"role": "user", "content": "x"})
    client.append_message(created.session_id, {"role": "assistant", "content": "y"})
    client.complete_session(created.session_id, final_message={"role": "user", "content": "z"})
    made = client.create_job(models=["m"], name="job-{i}")
    return {
        "transcript": [(m.role, m.content) for m in client.get_session_transcript(session.session_id).transcript],
        "sessions": [(s.model, s.status, s.step_count) for group in listed.tasks for s in group.sessions],
        "streamed": len(client.get_session_transcript(created.session_id).transcript),
        "job": [made.name, client.get_job(made.job_id).status, client.get_job(job).status],
        "jobs": len(client.list_jobs()),
    }


def refusals(url: str, key: str) -> Any:
    client = Fleet(api_key=key, base_url=url)
    env = client.make("echo")
    answer = {
        "environment": caught(lambda: client.make("nothing")),
        "version": caught(lambda: client.make("notes:v9")),
        "region": caught(lambda: client.make("notes", region="mars")),
        "key": caught(lambda: Fleet(api_key="wrong", base_url=url).account()),
        "judge": caught(lambda: env.judge.grade("Is it good?", "yes")),
    }
    env.close()
    return answer


def limit(url: str, key: str) -> Any:
    client = Fleet(api_key=key, base_url=url)
    most = client.account().instance_limit - client.account().instance_count
    envs = [client.make("echo", run_id="limit") for _ in range(most)]
    error = None
    try:
        client.make("echo", run_id="limit")
    except fleet.FleetInstanceLimitError as refused:
        error = [refused.running_instances, refused.instance_limit]
    client.close_all(run_id="limit")
    return [len(envs) == most, error, client.account().instance_count]


def lost_answers(url: str, key: str) -> Any:
    """A create, a grade, a log and a close whose answers are lost, each repeated by the client itself."""
    client = Fleet(api_key=key, base_url=url)
    inject(url, key, path="/v1/env/instances$", method="POST", after=True, status=503)
    env = client.make("notes", run_id="lost")
    made = [env.status, len(client.instances(run_id="lost")), env.reset().success]
    inject(url, key, path="/v1/verifiers/execute", method="POST", after=True, drop=True)
    task = Task(key="lost", prompt="p", env_id="notes", verifier_func=VERIFIER, verifier_id="x")
    graded = task.verify_detailed(env, final_answer="done").result
    inject(url, key, path="/v1/traces/logs", method="POST", after=True, drop=True)
    logged = client.start_session(model="m").log([{"role": "user", "content": "hi"}], "hello").message_count
    inject(url, key, path=f"/v1/env/instances/{env.instance_id}$", method="DELETE", after=True, status=503)
    return [*made, graded, logged, env.close().status]


report(*chosen(whole_sequence, listing, module_functions, tasks, traces, refusals, limit, lost_answers))

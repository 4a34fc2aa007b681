"""The conformance suite of forms: every module of the package that defines a form is tested here."""

import json

import pytest

from export.rollouts import END, call, conversation, exported, forked, problems, record
from paddock.capture.trace import Call, Caller, LogprobsKind
from paddock.errors import ConfigError
from paddock.export import FORMS, load_form
from paddock.export.policy import Policy
from paddock.export.samples import samples
from paddock.store.outcome import Outcome

FOR_TRAINING = [form for form in FORMS if load_form(form).is_for_training]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("calls", [conversation(3), forked()], ids=["conversation", "forked"])
def test_exported_documents_have_no_problems(form: str, calls: list[Call]) -> None:
    documents = exported(form, calls)
    assert documents
    assert [problems(form, document) for document in documents] == [[]] * len(documents)


@pytest.mark.parametrize("form", FOR_TRAINING)
def test_an_unscored_rollout_is_left_out_or_flagged(form: str) -> None:
    unscored = {"reward": None, "outcome": Outcome.VERIFIER, "reward_reason": "the tests hung"}
    assert exported(form, conversation(), **unscored) == []
    (document,) = exported(form, conversation(), Policy(unscored="flag"), **unscored)[:1]
    assert set(problems(form, document)) == {"it has no reward"}


@pytest.mark.parametrize("form", FOR_TRAINING)
def test_nothing_to_train_on_is_no_document(form: str) -> None:
    calls = conversation(2)
    for each in calls:
        each.aborted = True
    if form == "atif":
        masks = [
            step["extra"]["loss_mask"] for step in exported(form, calls)[0]["steps"] if step["source"] == "agent"
        ]
        assert masks == [0, 0]
    else:
        assert exported(form, calls) == []


@pytest.mark.parametrize("form", FORMS)
def test_temperature_and_kind_of_logprobs_are_exported(form: str) -> None:
    calls = conversation(2, forwarded={}, temperature=0.625, logprobs_kind=LogprobsKind.PROCESSED)
    text = json.dumps(exported(form, calls))
    assert "0.625" in text
    assert "processed" in text


@pytest.mark.parametrize("form", FOR_TRAINING)
def test_a_call_of_another_process_is_left_out(form: str) -> None:
    foreign = call(3, [7, 7], [4321, END], caller=Caller.FOREIGN, caller_reason="curl")
    document = json.dumps(exported(form, [*conversation(2), foreign]))
    if form not in ("atif", "verifiers"):
        assert "4321" not in document
    assert [*samples(record(), [foreign])] == []
    assert Policy().rejections([foreign]) == ["another process than the agent's program made it: curl"]


def test_an_unknown_form_names_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        load_form("parkett")
    assert all(form in (caught.value.hint or "") for form in FORMS)

"""Scripts that keep their own loop: run by real processes, and by themselves. Data: scikit-learn's digits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import sklearn.datasets  # here, so that the processes, which are forks of this one, need not
import torch
from attached import PLAIN, launch, same, weights
from beds.short_windows import short
from torch import Tensor, nn

from paceline.api.execute import execute
from paceline.config import discovery
from paceline.config.from_plan import scheme_of
from paceline.config.plan import Plan
from paceline.errors import LossError, RunError, UsageError
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

__all__ = ["launch"]  # pytest finds them here


def by_hand(steps: int, lr: float, workers: int) -> Tensor:
    """The same loop in one process: steps along the mean of so many batches' gradients."""
    data = sklearn.datasets.load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    items = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 40 * 32, 32)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        grads = []
        for rank in range(workers):
            images, labels = items[(step * workers + rank) % len(items)]
            loss = nn.functional.cross_entropy(model(images), labels)
            grads.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, *several in zip(model.parameters(), *grads, strict=True):
            parameter.grad = sum(several[1:], several[0]) / len(several)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class TestTheLoop:
    def test_synchronous_workers_are_one_loop_over_larger_batches(self, launch):
        result = launch(PLAIN)
        assert result.updates == 30
        assert result.gradients in (60, 61)  # who got the last version may have begun with it
        assert result.samples == 32 * result.gradients
        assert same(result.vector, by_hand(30, 0.2, 2))

    @pytest.mark.parametrize("name", list(discovery.schemes()))
    def test_every_scheme_lives_in_a_script(self, launch, name):
        body = f"""
with attach(model, "{name}", steps=20, **{short(name)}) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(model(images), labels))
    assert pace.done and pace.updates >= 20 and pace.staleness.mean >= 0
keep(f"{{pace.rank}}.weights", model)
"""
        workers = 1 if discovery.schemes()[name].value.alone else 2
        result = launch(body, workers=workers)
        # two that add without a lock may both have begun the last update
        assert 20 <= result.updates <= (20 if name != "hogwild" else 19 + workers)
        assert result.restarts == 0
        for rank in range(workers):
            assert same(weights(f"{rank}.weights"), result.vector)

    def test_what_the_script_does_between_two_steps_changes_nothing(self, launch):
        calm = launch(PLAIN).vector
        busy = launch("""
evaluate = lambda m: {"sum": m(X).sum()}
with attach(model, "sync", lr=0.2, steps=30, evaluate=evaluate, hooks=["validation:every=7"]) as pace:
    for images, labels in pace.share(items):
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(X[:100])
        model.train()
        loss = F.cross_entropy(model(images), labels)
        (loss * 0.5).backward(retain_graph=True)
        assert pace.step(loss * 0.5) == (not pace.done)
        assert model.training
""")
        assert same(busy.vector, calm)
        assert len(busy.history) == 4
        assert busy.metrics.keys() == {"loss", "sum"}

    def test_the_model_stays_the_scripts_own(self, launch):
        result = launch("""
model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 10))
model[3].weight.requires_grad_(False)
before = [(id(p), p.requires_grad, p.shape) for p in model.parameters()]
frozen = model[3].weight.clone()
def evaluate(model):
    return {"accuracy": (model(X).argmax(1) == Y).float().mean().item()}
with attach(model, "async", lr=0.05, steps=20, evaluate=evaluate) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(model(images), labels))
assert before == [(id(p), p.requires_grad, p.shape) for p in model.parameters()]
assert torch.equal(model[3].weight, frozen)
assert model.training and all(p.grad is None for p in model.parameters())
segment = pace._session.memory.segment
for one in (*model.parameters(), *model.buffers()):
    assert segment.offset(one.detach()) is None
assert model[1].num_batches_tracked > 0
model.eval()
Path(f"{pace.rank}.accuracy").write_text(str(evaluate(model)["accuracy"]))
F.cross_entropy(model(X), Y).backward()
torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()  # it can be trained on
""")
        # buffers are those of the centre too: everybody evaluates what the chief has told
        assert {Path(f"{rank}.accuracy").read_text() for rank in range(2)} == {str(result.metrics["accuracy"])}

    def test_a_worker_may_leave_and_one_may_stop_all(self, launch):
        said: list[str] = []
        result = launch(
            """
with attach(model, "async", lr=0.01) as pace:
    for number, (images, labels) in enumerate(pace.share(items)):
        if pace.rank == 1 and number == 5:
            break
        pace.step(F.cross_entropy(model(images), labels))
        if pace.updates >= 40 and pace._board.gone[1]:
            pace.stop("enough")
""",
            said=said,
        )
        assert result.updates >= 40
        assert result.stopped == "enough"
        assert said == ["worker:1 leaves: its loop has ended at step 5"]

    def test_data_that_run_out(self, launch):
        said: list[str] = []
        result = launch(
            """
with attach(model, "async", lr=0.01) as pace:
    for images, labels in pace.share(iter(items[:9])):
        pace.step(F.cross_entropy(model(images), labels), size=3)
assert pace.done
""",
            said=said,
        )
        assert (result.updates, result.samples) == (9, 27)
        assert sorted(said) == [f"worker:{rank} leaves: its data have run out" for rank in range(2)]


class TestTheCommandLine:
    def test_it_has_the_last_word(self, launch):
        said: list[str] = []
        result = launch(PLAIN, said=said, scheme="allreduce", hyper={"lr": 0.1}, steps=10)
        assert (result.scheme, result.updates) == ("allreduce", 10)
        assert same(result.vector, by_hand(10, 0.1, 2))
        assert said == [
            "the command line's --scheme allreduce takes the place of the script's sync; kept of the script: lr=0.2",
            "the command line sets lr=0.1 (instead of 0.2)",
            "the command line's --steps 10 takes the place of the script's 30",
        ]

    @pytest.mark.parametrize(
        "asked",
        ['"sync", lr=0.05, rule="momentum", aggregate=1', "SyncSGD(lr=0.05, rule=Momentum(), aggregate=1)"],
        ids=["by name", "an instance"],
    )
    def test_another_scheme_keeps_what_both_have_and_says_what_is_dropped(self, launch, asked):
        said: list[str] = []
        imports = "from paceline.schemes.sync import SyncSGD\nfrom paceline.rules import Momentum\n"
        result = launch(imports + PLAIN.replace('"sync", lr=0.2', asked), said=said, scheme="allreduce")
        assert (result.hyper["lr"], result.hyper["rule"]) == (0.05, "momentum")
        assert said == [
            "the command line's --scheme allreduce takes the place of the script's sync; "
            "kept of the script: lr=0.05, rule=momentum",
            "the script's aggregate=1 is dropped: allreduce has no such hyper-parameter",
        ]

    def test_another_scheme_keeps_the_optimizer_and_says_that_it_has_its_own_rate(self, launch):
        said: list[str] = []
        asked = '"sync", optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)'
        result = launch(PLAIN.replace('"sync", lr=0.2', asked), said=said, scheme="allreduce", hyper={"lr": "0.5"})
        assert result.hyper["rule"] == "torch.optim:AdamW"
        assert said == [
            "the command line's --scheme allreduce takes the place of the script's sync; "
            "kept of the script: rule=torch.optim:AdamW",
            "the command line sets lr=0.5 (instead of 0.1)",
            "lr does not change the rates of the script's optimizer, which has its own",
        ]

    def test_hyper_parameters_alone(self, launch):
        result = launch(PLAIN, hyper={"lr": "0.1"}, hooks=["stop-at-step:last_step=4"])
        assert result.updates == 4
        assert same(result.vector, by_hand(4, 0.1, 2))

    def test_servers_that_a_scheme_does_not_need_go_home(self, launch):
        said: list[str] = []
        result = launch(PLAIN.replace("sync", "allreduce"), servers=2, said=said)
        assert (result.updates, result.restarts) == (30, 0)
        assert said == ["allreduce has no server: --servers 2 is not used"]

    def test_a_scheme_of_the_scripts_folder(self, launch, tmp_path):
        (tmp_path / "mine.py").write_text("""
from dataclasses import dataclass
from paceline.schemes.sync import SyncSGD

@dataclass(frozen=True)
class Mine(SyncSGD, name="mine"):
    factor: float = 1.0
""")
        for asked in ('"mine.py:Mine"', "__import__('mine').Mine", "__import__('mine').Mine(factor=2.0)"):
            result = launch(PLAIN.replace('"sync"', asked))
            saved = checkpoint.newest(Path(result.directory) / "checkpoints", print)
            assert saved.numbers["scheme"] == "mine"
            assert same(result.vector, by_hand(30, 0.2, 2))

    def test_going_on_from_a_checkpoint(self, launch):
        body = PLAIN + '\nPath("resumed").write_text(str(pace.resumed))'
        result = launch(body, steps=10)
        assert Path("resumed").read_text() == "False"
        directory = RunDirectory.open(result.directory)
        plan = dataclasses.replace(Plan.from_dict(directory.plan()), steps=20)
        result = execute(plan, scheme_of(plan, {}), {}, tell=lambda *_: None, watch=lambda _: None)
        assert result.updates == 20
        assert Path("resumed").read_text() == "True"


class TestDeath:
    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("scheme", ["async", "sync", "allreduce"])
    def test_a_killed_worker_is_back(self, launch, scheme, rank):
        result = launch(f"""
with attach(model, "{scheme}", lr=0.05, steps=300) as pace:
    for images, labels in pace.share(items):
        loss = F.cross_entropy(model(images), labels)
        if pace.rank == {rank} and pace.resumed:
            Path("back").touch()
        elif pace.rank == {rank} and pace.updates >= 20:
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # or the other one might make all updates before this one has begun, or is back
        while pace.rank != {rank} and pace.updates >= 100 and not Path("killed").exists():
            time.sleep(0.01)
        if pace.rank != {rank} and pace.updates >= 100 and not Path("back").exists():
            time.sleep(0.05)  # who is away gets a place between two steps
        pace.step(loss)
if pace.rank == {rank}:
    Path("resumed").write_text(str(pace.resumed))
keep(f"{{pace.rank}}.weights", model)
""")
        assert (result.updates, result.restarts) == (300, 1)
        assert Path("resumed").read_text() == "True"
        assert all(same(weights(f"{one}.weights"), result.vector) for one in range(2))

    @pytest.mark.parametrize("rank", [0, 1])
    def test_after_the_training_only_the_rest_is_done_again(self, launch, rank):
        result = launch(
            PLAIN
            + f"""
if pace.rank == {rank} and not Path("killed").exists():
    Path("killed").touch()
    Path(f"{{pace.rank}}.weights").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
"""
        )
        assert (result.updates, result.restarts) == (30, 1)
        assert same(weights(f"{rank}.weights"), by_hand(30, 0.2, 2))


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("", r"script.py has ended without paceline.attach\(\)"),
            ("sys.exit()", r"script.py has ended without paceline.attach\(\)"),
            ("attach(model)", "never entered its block"),
            ("pace = attach(model)\npace.step(None)", r"pace.step\(\) belongs inside the block"),
            (PLAIN + "attach(model)", "called a second time"),
            ("attach(model, 'snyc')", "no scheme 'snyc'; did you mean 'sync'"),
            ("attach(model, lr=-1)", "lr must be at least 0"),
            ("attach(model, steps=0)", "steps must be at least 1"),
            ("attach(model, 'sgd')", "takes 1 worker, not 2"),
            ("attach(nn.ReLU())", "has no trainable parameters"),
            (
                "from paceline.schemes.sync import SyncSGD\nclass Mine(SyncSGD): pass\n"
                "import dataclasses\nattach(model, dataclasses.dataclass(frozen=True)(Mine))",
                "put the class into a file of its own and name it",
            ),
            (PLAIN.replace("items", "[]"), "the loader is empty"),
            (PLAIN.replace("items", "items[:1]"), "gives worker 1 nothing: fewer items in an epoch than 2 workers"),
            (PLAIN.replace("items", "5"), "not a int"),
            (PLAIN.replace("F.cross_entropy(model(images), labels)", "model(images)"), r"of shape \(32, 10\)"),
            (PLAIN.replace("F.cross_entropy(model(images), labels)", "labels.sum()"), "does not depend on"),
            (PLAIN.replace("steps=30", "steps=3, evaluate=lambda m: 0.5"), "must give metrics by name"),
        ],
    )
    def test_wrong_use(self, launch, body, message):
        with pytest.raises(UsageError, match=message) as caught:
            launch(body)
        assert str(caught.value).startswith(("chief, step", "worker:1, step"))
        assert caught.value.exit_code == 2

    def test_an_evaluator(self, launch):
        with pytest.raises(UsageError, match="a script cannot have an evaluator"):
            launch(PLAIN, evaluator=True)

    def test_an_exception_in_the_loop_says_who_where_and_when(self, launch):
        with pytest.raises(RunError, match=r"^worker:1, step 7: ZeroDivisionError: division by zero\b") as caught:
            launch("""
with attach(model, "sync", lr=0.1, steps=50) as pace:
    for images, labels in pace.share(items):
        loss = F.cross_entropy(model(images), labels)
        if pace.rank == 1 and pace.updates == 7:
            1 / 0
        pace.step(loss)
Path("went on").touch()
""")
        assert caught.value.exit_code == 1
        assert any("1 / 0" in note for note in caught.value.__notes__)
        assert not Path("went on").exists()
        assert caught.value.result.updates <= 7

    def test_a_loss_that_is_no_number(self, launch):
        with pytest.raises(LossError, match=r"step 0, update 0: the loss is nan"):
            launch(PLAIN.replace("pace.step(", "pace.step(torch.nan * "))

    @pytest.mark.parametrize(
        ("call", "message"), [("sys.exit()", "inside the block"), ("sys.exit(4)", r"called sys.exit\(4\)")]
    )
    def test_leaving_by_exit(self, launch, call, message):
        with pytest.raises(RunError, match=message):
            launch(PLAIN.replace("        pace.step", f"        {call}\n        pace.step"))

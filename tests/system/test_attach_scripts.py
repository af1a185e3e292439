"""Scripts as people write them: their own backward pass, random numbers, frozen layers, GradScaler, torch.compile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from attached import PRELUDE, launch

from paceline.errors import RunError, UsageError
from paceline.runs import checkpoint

__all__ = ["launch"]

MODEL = "model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))\n"
SCRIPT = (
    MODEL
    + """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
torch.manual_seed(7)
"""
)
LOOP = "for images, labels in loader:\n"
PACED = """
with attach(model, "sgd", lr=0.1, steps=50) as pace:
    for images, labels in pace.share(loader):
"""
RECIPES = {
    "the loss alone": (
        "loss = F.cross_entropy(model(images), labels); opt.zero_grad(); loss.backward(); opt.step()",
        "pace.step(F.cross_entropy(model(images), labels))",
    ),
    "clipping": (
        "opt.zero_grad(); loss = F.cross_entropy(model(images), labels); loss.backward(); "
        "nn.utils.clip_grad_norm_(model.parameters(), 0.5); opt.step()",
        "loss = F.cross_entropy(model(images), labels); loss.backward(); "
        "nn.utils.clip_grad_norm_(model.parameters(), 0.5); pace.step(loss.detach())",
    ),
    "zero_grad and no loss": (
        "opt.zero_grad(); F.cross_entropy(model(images), labels).backward(); opt.step()",
        "model.zero_grad(); F.cross_entropy(model(images), labels).backward(); pace.step()",
    ),
    "GradScaler and autocast": (
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "            loss = F.cross_entropy(model(images), labels)\n"
        "        opt.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(opt); "
        "nn.utils.clip_grad_norm_(model.parameters(), 0.5); scaler.step(opt); scaler.update()",
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "            loss = F.cross_entropy(model(images), labels)\n"
        "        opt = pace.optimizer; opt.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(opt); "
        "nn.utils.clip_grad_norm_(model.parameters(), 0.5); scaler.step(opt); scaler.update()",
    ),
    "activation checkpointing": (
        "from torch.utils.checkpoint import checkpoint; opt.zero_grad(); "
        "F.cross_entropy(checkpoint(model, images, use_reentrant=False), labels).backward(); opt.step()",
        "from torch.utils.checkpoint import checkpoint; "
        "pace.step(F.cross_entropy(checkpoint(model, images, use_reentrant=False), labels))",
    ),
    "torch.compile": (
        "opt.zero_grad(); F.cross_entropy(compiled(images), labels).backward(); opt.step()",
        "pace.step(F.cross_entropy(compiled(images), labels))",
    ),
}
SETUP = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
compiled = torch.compile(model, backend="aot_eager")
"""


def plain(step: str) -> bytes:
    """The parameters after fifty steps of the script without paceline."""
    scope: dict[str, object] = {}
    body = f"""
opt = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
while done < 50:
    for images, labels in loader:
        {step}
        done += 1
        if done == 50:
            break
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
"""
    exec(PRELUDE + SCRIPT + SETUP + body, scope)
    return bytes(scope["weights"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_one_worker_has_the_bits_of_the_script_without_paceline(name, launch):
    theirs, ours = RECIPES[name]
    launch(SCRIPT + SETUP + PACED + f"        {ours}\nkeep('weights', model)\n", workers=1)
    assert Path("weights").read_bytes() == plain(theirs)


def test_a_compiled_model_may_be_attached(launch):
    said: list[str] = []
    launch(
        SCRIPT
        + SETUP
        + PACED.replace("attach(model", "attach(compiled")
        + "        "
        + RECIPES["torch.compile"][1]
        + "\nkeep('weights', model)\n",
        workers=1,
        said=said,
    )
    assert Path("weights").read_bytes() == plain(RECIPES["torch.compile"][0])
    saved = checkpoint.newest(Path("run-0/checkpoints"), lambda _: None)
    assert saved is not None
    assert saved.numbers["parameters"][0][0] == "0.weight"  # without torch.compile's prefix


class TestRandomNumbers:
    DRAWN = """
import json, random
import numpy as np
before = [random.random(), np.random.rand(), torch.rand(1).item()]
with attach(model, "sync", lr=0.1, steps=3) as pace:
    inside = [random.random(), np.random.rand(), torch.rand(1).item()]
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(model(images), labels))
Path(f"{pace.rank}.json").write_text(json.dumps([before, inside]))
"""

    def drawn(self, launch, **settings) -> tuple[list[list[float]], ...]:
        launch(self.DRAWN.replace("torch.manual_seed(0)", ""), **settings)
        return tuple(json.loads(Path(f"{rank}.json").read_text()) for rank in range(2))

    def test_workers_draw_alike_before_attach_and_each_their_own_inside(self, launch):
        np.random.seed(5)
        first, second = self.drawn(launch)
        assert first[0] == second[0]
        assert all(a != b for a, b in zip(first[1], second[1], strict=True))
        np.random.seed(6)  # of the launcher: a fork inherits its state
        assert self.drawn(launch) == (first, second)
        again = self.drawn(launch, seed=1)
        assert again[0][1] != first[1]


ACCUMULATED = """
losses = []
with attach(model, "sync", lr=0.2, steps=10, evaluate=lambda model: {}) as pace:
    share = iter(pace.share(items))
    while not pace.done:
        total = 0.0
        for part in range(4):
            images, labels = next(share)
            loss = F.cross_entropy(model(images), labels) / 4
            total += loss.item()
            BACKWARD
        pace.step(LOSS)
        losses.append(total)
Path(f"{pace.rank}.loss").write_text(repr(losses[-1]))
"""


@pytest.mark.parametrize(
    ("backward", "loss"),
    [("pace.backward(loss)", ""), ("loss.backward()", "total"), ("loss.backward()", "torch.tensor(total)")],
)
def test_the_loss_of_an_accumulated_gradient_is_that_of_all_its_parts(backward, loss, launch):
    result = launch(ACCUMULATED.replace("BACKWARD", backward).replace("LOSS", loss), workers=1)
    assert result.metrics["loss"] == pytest.approx(float(Path("0.loss").read_text()), rel=1e-6)
    assert result.samples == 10 * 4 * 32


def test_a_loss_that_is_not_given_is_not_shown(launch):
    said: list[str] = []
    body = (
        PRELUDE
        and """
with attach(model, "sync", lr=0.2, steps=10, hooks=["nan-guard"]) as pace:
    for images, labels in pace.share(items):
        F.cross_entropy(model(images), labels).backward()
        pace.step()
"""
    )
    result = launch(body, said=said)
    assert result.updates == 10
    assert "loss" not in result.metrics
    assert any("the loss is not shown: pass it" in text for text in said)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pace.step()", "no backward pass since the last step"),
        ("pace.step(1.5)", "no backward pass since the last step"),
        ("loss.backward(); pace.step(loss)", "after your own, write pace.step"),
        ("model[0].weight.requires_grad_(False); pace.step(loss)", r"requires_grad of 0\.weight was changed"),
        ("frozen.requires_grad_(True); pace.step(loss)", r"requires_grad of 2\.bias was changed"),
        ("pace.step(loss); model.double()", "moved or converted inside the block"),
        ("pace.optimizer.step(lambda: loss)", "takes no closure"),
        ("loss.backward(); opt.step(); pace.step()", r"SGD.step\(\) would change the model behind the scheme"),
    ],
)
def test_what_would_go_wrong_without_a_word_is_refused(line, message, launch):
    with pytest.raises((UsageError, RunError)) as caught:
        launch(
            "frozen = model[2].bias.requires_grad_(False)\nopt = torch.optim.SGD([model[0].weight], lr=0.1)\n"
            'with attach(model, "sync", lr=0.2, steps=10) as pace:\n'
            "    for images, labels in pace.share(items):\n"
            "        loss = F.cross_entropy(model(images.to(model[0].weight.dtype)), labels)\n"
            f"        {line}\n"
        )
    assert caught.match(message) or any(message in note for note in caught.value.__notes__), caught.value.__notes__


def test_only_parameters_that_train_travel(launch):
    """Low-rank adapters: the frozen model stays in the script."""
    launch("""
for parameter in model.parameters():
    parameter.requires_grad_(False)
before = [p.clone() for p in model.parameters()]
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.down, self.up = model, nn.Linear(64, 2, bias=False), nn.Linear(2, 10, bias=False)
    def forward(self, x):
        return self.model(x) + self.up(self.down(x))
adapted = Adapted()
with attach(adapted, "downpour", lr=0.2, window=3, steps=30) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(adapted(images), labels))
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
assert adapted.up.weight.abs().sum() > 0
""")
    saved = checkpoint.newest(Path("run-0/checkpoints"), lambda _: None)
    assert saved is not None
    assert saved.numbers["parameters"] == [["down.weight", [2, 64]], ["up.weight", [10, 2]]]


def test_a_loop_over_epochs_ends_the_run_where_it_ends(launch):
    """As many scripts are: a function trains for one epoch, and is called by a loop over epochs."""
    result = launch(
        SCRIPT
        + """
def train(loader, epoch):
    seen = 0
    for images, labels in loader:
        pace.step(F.cross_entropy(model(images), labels))
        seen += len(images)
    print(f"epoch {epoch}: {seen} of {len(loader.dataset)} in {len(loader)} batches of {loader.batch_size}")
    return seen

with attach(model, "allreduce", lr=0.1) as pace:
    seen = [train(pace.share(loader, epochs=1), epoch) for epoch in range(3)]
    assert pace.share(loader).epoch == 2
Path(f"{pace.rank}.seen").write_text(str(sum(seen)))
keep(f"{pace.rank}.weights", model)
"""
    )
    assert result.samples == 3 * 1797 == sum(int(Path(f"{rank}.seen").read_text()) for rank in range(2))
    assert Path("0.weights").read_bytes() == Path("1.weights").read_bytes()


OPTIMIZED = """
opt = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.02}], lr=0.01)
with attach(model, "allreduce", optimizer=opt, steps=20) as pace:
    for images, labels in pace.share(loader):
        loss = F.cross_entropy(model(images), labels)
        LINE
keep("weights", model)
"""


def test_the_scripts_own_optimizer_is_the_rule(launch):
    launch(SCRIPT + OPTIMIZED.replace("LINE", "loss.backward(); pace.step(loss.detach())"), workers=1)
    scope: dict[str, object] = {}
    plain = """
for _, (images, labels) in zip(range(20), loader):
    opt.zero_grad(); F.cross_entropy(model(images), labels).backward(); opt.step()
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
"""
    exec(PRELUDE + SCRIPT + OPTIMIZED.splitlines()[1] + plain, scope)
    assert Path("weights").read_bytes() == scope["weights"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("loss.backward(); opt.step(); pace.step()", r"AdamW.step\(\) would change the model behind the scheme"),
        ("opt.param_groups[1]['lr'] *= 0.5; pace.step(loss)", "rate of the optimizer was changed from 0.02 to 0.01"),
    ],
)
def test_it_is_not_stepped_or_changed_in_the_block(line, message, launch):
    with pytest.raises(UsageError, match=message):
        launch(SCRIPT + OPTIMIZED.replace("LINE", line), workers=1)


GAN = """
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))
critic = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
opt = {"critic": torch.optim.Adam(critic.parameters(), lr=0.01),
       "generator": torch.optim.OPTIMIZER(generator.parameters(), lr=0.003, weight_decay=0.1)}
both = nn.ModuleDict({"generator": generator, "critic": critic})
ONE, ZERO = torch.ones(32, 1), torch.zeros(32, 1)

def losses(images):
    "Two steps of the critic for one of the generator."
    for _ in range(2):
        fake = generator(torch.randn(32, 4)).detach()
        yield "critic", (F.binary_cross_entropy_with_logits(critic(images), ONE)
                         + F.binary_cross_entropy_with_logits(critic(fake), ZERO))
    yield "generator", F.binary_cross_entropy_with_logits(critic(generator(torch.randn(32, 4))), ONE)
"""
GAN_PLAIN = """
for images, _ in items[:20]:
    for name, loss in losses(images):
        opt[name].zero_grad(); loss.backward(); opt[name].step()
weights = torch.cat([p.detach().reshape(-1) for p in both.parameters()]).numpy().tobytes()
"""
GAN_PACED = """
with attach(both, "SCHEME", optimizer=opt) as pace:
    for images, _ in pace.share(items[:20], epochs=1):
        for name, loss in losses(images):
            STEP
keep("weights", both)
"""


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop", "AdamW"])
@pytest.mark.parametrize(
    ("scheme", "step"),
    [("allreduce", "pace.step(loss, of=name)"), ("async", "loss.backward(); pace.optimizers[name].step()")],
)
def test_two_models_are_stepped_in_turns_each_by_its_own_optimizer(scheme, step, optimizer, launch):
    script = GAN.replace("OPTIMIZER", optimizer)
    result = launch(script + GAN_PACED.replace("SCHEME", scheme).replace("STEP", step), workers=1)
    scope: dict[str, object] = {}
    exec(PRELUDE + script + GAN_PLAIN, scope)
    assert Path("weights").read_bytes() == scope["weights"]
    assert result.updates == 60


def test_two_models_train_in_two_processes(launch):
    script = GAN.replace("OPTIMIZER", "RMSprop") + GAN_PACED.replace("SCHEME", "allreduce")
    launch(script.replace("STEP", "pace.step(loss, of=name)").replace('"weights"', 'f"{pace.rank}.weights"'))
    assert Path("0.weights").read_bytes() == Path("1.weights").read_bytes()


@pytest.mark.parametrize("step", ["pace.step(loss)", "pace.step(loss, of='teacher')"])
def test_an_optimizer_of_several_must_be_named(step, launch):
    script = GAN.replace("OPTIMIZER", "SGD") + GAN_PACED.replace("SCHEME", "allreduce").replace("STEP", step)
    with pytest.raises(UsageError, match="must be one of 'critic', 'generator'"):
        launch(script, workers=1)


@pytest.mark.parametrize(
    ("scheme", "workers", "updates"), [("allreduce", 1, 80), ("allreduce", 2, 40), ("async", 2, 80), ("sync", 2, 40)]
)
def test_epochs_are_equal_work_for_any_scheme_and_number_of_workers(scheme, workers, updates, launch):
    result = launch(
        f"""
with attach(model, "{scheme}", lr=0.1, epochs=2, loader=items) as pace:
    for images, labels in pace.share(items):
        pace.step(F.cross_entropy(model(images), labels))
""",
        workers=workers,
    )
    assert result.updates == updates  # of forty batches in an epoch


def test_epochs_need_the_loader(launch):
    with pytest.raises(UsageError, match="give attach"):
        launch('attach(model, "sync", epochs=2)')
    with pytest.raises(UsageError, match="one unit"):
        launch('attach(model, "sync", epochs=2, steps=3, loader=items)')

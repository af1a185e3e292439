"""Every Python block of README and docs is run, or says in a comment why it is a fragment.

The blocks of a page run in turn in one process, in a folder of their own: what stands before them in `GIVEN` is what
the page takes for granted, and `SMALLER` makes the same calls shorter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from beds.pages import ROOT, Block, blocks, pages

ELSEWHERE = {
    "docs/add-a-scheme.md": {"class Lazy", "class Shrinking"},  # test_documents.py trains them
    "docs/attach-keras-jax.md": {""},  # tests/engines/test_framework_pages.py
    "docs/from-tensorflow.md": {""},  # test_from_tensorflow.py
}
LESSONS = "docs/tutorial/"  # test_tutorial.py
SMALLER = [
    (r"\b(max_steps|steps)=[\d_]+", r"\1=12"),
    (r"\bepochs=\d+", "epochs=1"),
    (r"range\(14\)", "range(2)"),
    (r"samples=32_000", "samples=640"),
    (r"workers=4(?!, speeds)", "workers=2"),
    (r'"(mnist-cnn|char-lm)"', '"digits-mlp"'),
    (r"throttle=5", "throttle=0"),
]
DATA = """
import functools, itertools
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
import paceline

x, y = torch.randn(256, 20), torch.randint(0, 2, (256,))
xt, yt = x[:64], y[:64]
loader = DataLoader(TensorDataset(x, y), batch_size=32)
def make_model():
    return nn.Linear(20, 2)
model = make_model()
"""
ATTACHED = """
pace = paceline.attach(model, "sync", lr=0.1, steps=1000)
pace.__enter__()
"""
SCHEMES = """
from dataclasses import dataclass
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, on_server
"""
# page -> of some blocks (by words in them) what the reader has before them
GIVEN = {
    "README.md": {"": DATA + SCHEMES},
    "docs/add-a-scheme.md": {"": SCHEMES},
    "docs/attach.md": {
        "clip_grad_norm_": DATA
        + ATTACHED
        + "images, labels = next(iter(loader)); loss = F.cross_entropy(model(images), labels)",
        "micro_batches": DATA + ATTACHED + "micro_batches = list(loader)[:2]",
        "ModuleDict": DATA
        + """
generator, critic = nn.Linear(4, 20), nn.Linear(20, 1)
def critic_loss(images):
    return critic(generator(torch.randn(8, 4)).detach()).mean() - critic(images).mean()
def generator_loss():
    return -critic(generator(torch.randn(8, 4))).mean()
""",
        "range(14)": DATA
        + ATTACHED
        + """
def train(model, batches):
    for images, labels in batches:
        pace.step(F.cross_entropy(model(images), labels))
""",
        "next(mine)": DATA + "mine = itertools.cycle(loader)",
        "my_script-001": DATA
        + """
with paceline.attach(model, "sync", lr=0.1, steps=4, directory="runs/my_script-001") as pace:
    for images, labels in pace.share(loader):
        pace.step(F.cross_entropy(model(images), labels))
""",
    },
    "docs/compression.md": {"": "import paceline"},
    "docs/optimizers.md": {
        "": DATA + "task = paceline.TorchTask(make_model, nn.CrossEntropyLoss(), train=(x, y), test=(xt, yt), batch=32)"
    },
    "docs/verify.md": {
        "": """
import paceline
for name in ("one", "three"):
    paceline.train("digits-mlp", "async", workers=2, steps=12, directory=f"runs/{name}")
"""
    },
}
# files of the reader's own package that a page has written before
PACKAGE = {
    "docs/add-a-hook.md": "best_loss",
    "docs/add-a-launcher.md": "shells",
    "docs/add-a-transport.md": "message_transport",
}


def written(page: str) -> list[Block]:
    own = [block for block in blocks(page) if block.language == "python" and not block.fragment]
    return [block for block in own if not any(word in block.text for word in ELSEWHERE.get(page, ()))]


def programs() -> dict[str, str]:
    """Blocks that need what only they have before them are programs of their own; the others of a page are one."""
    found: dict[str, str] = {}
    for page in (one for one in pages() if not one.startswith(LESSONS)):
        given = GIVEN.get(page, {})
        for block in written(page):
            word = next((word for word in given if word and word in block.text), "")
            place = f"{page}:{block.line}" if word else page
            found[place] = found.get(place, given.get(word, "")) + "\n" + block.text
    return found


PROGRAMS = programs()


@pytest.mark.parametrize("place", PROGRAMS)
def test_it_runs(place: str, tmp_path: Path) -> None:
    page = place.partition(":")[0]
    if page in PACKAGE:
        (tmp_path / "my_package").mkdir()
        example = ROOT / "examples" / f"{PACKAGE[page]}.py"
        first = example.read_text(encoding="utf-8") if example.is_file() else written(page)[0].text
        (tmp_path / "my_package" / f"{PACKAGE[page]}.py").write_text(first, encoding="utf-8")
    program = PROGRAMS[place]
    for longer, shorter in SMALLER:
        program = re.sub(longer, shorter, program)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "program.py"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr


def test_fragments_are_few_and_of_other_libraries_or_listings() -> None:
    fragments = [block for page in pages() for block in blocks(page) if block.fragment]
    assert len(fragments) <= 8
    others = [block for page in pages() for block in blocks(page) if block.language == "py"]
    assert all("tf." in block.text or "saver" in block.text for block in others), "py: TensorFlow's, beside ours"

"""Fine-tuning in the style of Hugging Face: dict batches, a model that gives its own loss, a frozen base, a small head.

The question: does a passage of a play hold the beginning of a speech? `--base FILE` has the weights of the base.
"""

import argparse
import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--examples", type=int, default=20_000)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--base", help="a state_dict of the base, as torch.save writes it; without it, random weights")
parser.add_argument("--out", default="fine_tune.pt")
args = parser.parse_args()
torch.manual_seed(3)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    """Called with keywords; gives its loss if it gets labels."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.base = nn.ModuleDict(
            {
                "token": nn.Embedding(characters + 1, width, padding_idx=0),
                "encoder": nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True), 2, enable_nested_tensor=False
                ),
            }
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Output:
        hidden = self.base["encoder"](self.base["token"](input_ids), src_key_padding_mask=attention_mask == 0)
        weight = attention_mask[:, :, None].to(hidden.dtype)
        logits = self.head((hidden * weight).sum(1) / weight.sum(1))
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


def passages(ids: torch.Tensor, characters: str) -> list[dict[str, object]]:
    found = []
    for start in range(0, 48 * args.examples, 48):
        piece = ids[start : start + 24 + start % 25]  # of unequal lengths
        text = "".join(characters[i] for i in piece.tolist())
        found.append({"ids": piece.long() + 1, "label": int(re.search(r":\n", text) is not None)})
    return found


def collate(samples: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


text = load("shakespeare")
loader = DataLoader(passages(text.train[0], text.characters), args.batch, shuffle=True, collate_fn=collate)
model = Classifier(len(text.characters), args.width)
if args.base:
    model.base.load_state_dict(torch.load(args.base, weights_only=True))
model.base.requires_grad_(False)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)

with paceline.attach(model, "async", optimizer=optimizer) as pace:
    for epoch in range(args.epochs):
        model.train()
        for batch in pace.share(loader, epochs=1):
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            pace.step(loss.detach())
        print(f"epoch {epoch}: loss {loss.item():.3f}")

if pace.chief:
    torch.save(model.state_dict(), args.out)

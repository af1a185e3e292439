"""MNIST with the structure of many public scripts: functions for an epoch and a test, Adadelta, a rate per epoch."""

import argparse
from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import load


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2 * width * 144, 4 * width)
        self.fc2 = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch}, batch {batch_idx} of {len(train_loader)}: loss {loss.item():.4f}")


def test(model, device, test_loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    size = len(test_loader.dataset)
    print(f"test: loss {loss / size:.4f}, {correct} of {size} right")


def dataset(images, labels):
    if images.shape[-1] == 8:  # digits, which need no download
        images = F.pad(
            images.float().reshape(-1, 1, 8, 8).repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2)
        )
    images = images.float().reshape(-1, 1, 28, 28)
    return TensorDataset(images / images.max(), labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--out", default="mnist.pt")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    found = load(args.data)
    train_loader = DataLoader(dataset(*found.train), args.batch_size, shuffle=True)
    test_loader = DataLoader(dataset(*found.test), args.test_batch_size)
    model = Net(args.width).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = partial(StepLR, step_size=len(train_loader), gamma=args.gamma)

    with paceline.attach(model, "async", optimizer=optimizer, schedule=scheduler) as pace:
        for epoch in range(args.epochs):
            train(args, model, device, pace.share(train_loader, epochs=1), pace.optimizer, epoch)
            test(model, device, test_loader)

    if pace.chief:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()

"""Images classified by convolutional networks."""

import torch
from torch import Tensor, nn

from paceline.datasets import load
from paceline.task import Task
from paceline.tasks._options import classifier, fraction, whole
from paceline.torch_task.random_numbers import draws_nothing

CIFAR_MEAN = torch.tensor((0.49140, 0.48216, 0.44653)).view(3, 1, 1)
CIFAR_SPREAD = torch.tensor((0.24703, 0.24349, 0.26159)).view(3, 1, 1)


def grey_net(dropout: float) -> nn.Module:
    """Two convolutions and a wide layer, for 28 x 28 pixels: 3,274,634 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 64, 1024), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(1024, 10)),
    )


def colour_net() -> nn.Module:
    """Two convolutions and two layers, for 32 x 32 pixels in colour: 1,756,426 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 8 * 64, 384), nn.ReLU()),
        *(nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


@draws_nothing
def _colour(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return images.to(torch.float32, copy=True).div_(255).sub_(CIFAR_MEAN).div_(CIFAR_SPREAD), labels


def _grey_task(name: str, dropout: float, test_size: int, data: str) -> Task:
    fraction(dropout=dropout)
    whole(0, test_size=test_size)

    @draws_nothing
    def prepare(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.unsqueeze(1).to(torch.float32, copy=True).div_(255), labels

    return classifier(f"{name}-cnn", load(name, data or None), lambda: grey_net(dropout), test_size, prepare=prepare)


def mnist_cnn(dropout: float = 0.5, test_size: int = 0, data: str = "") -> Task:
    """MNIST, a convolutional network of 3.3 million parameters.

    Data: LeCun, Cortes, Burges; from the folder `data` or the first source that has them. The network of TensorFlow's
    MNIST guide of 2016: conv 5x5x32, pool, conv 5x5x64, pool, 1024 units, dropout, 10; ReLU; pixels from 0 to 1.
    Evaluated on the first `test_size` test images (0: all 10,000).
    """
    return _grey_task("mnist", dropout, test_size, data)


def fashion_cnn(dropout: float = 0.5, test_size: int = 0, data: str = "") -> Task:
    """Fashion-MNIST, the network of mnist-cnn.

    Data: Xiao, Rasul, Vollgraf 2017 (arXiv 1708.07747). Options as in mnist-cnn.
    """
    return _grey_task("fashion", dropout, test_size, data)


def cifar_cnn(parts: int = 5, test_size: int = 0, data: str = "") -> Task:
    """CIFAR-10, a convolutional network of 1.8 million parameters.

    Data: Krizhevsky 2009; the first `parts` of the five training files, channels standardised. conv 5x5x64,
    pool, conv 5x5x64, pool, 384 units, 192, 10; ReLU: TensorFlow's CIFAR-10 guide without its crops and its
    local normalisation. Evaluated on the first `test_size` test images (0: all 10,000).
    """
    whole(1, parts=parts)
    whole(0, test_size=test_size)
    found = load("cifar", data or None, parts=parts)
    return classifier("cifar-cnn", found, colour_net, test_size, prepare=_colour)

"""Training by `model.fit` of Keras under any scheme: `model.fit(…, callbacks=[paceline.keras.Pace("downpour", …)])`.
Callbacks of Keras in a run of a KerasTask: `paceline.train(task, …, hooks=[paceline.keras.Callbacks([…])])`."""

from paceline.errors import UsageError

try:
    import keras as _keras
except ImportError as error:
    raise UsageError(f"paceline.keras needs Keras 3 ({error}): pip install 'paceline[keras]'") from error
if int(_keras.__version__.partition(".")[0]) < 3:
    raise UsageError(f"paceline.keras needs Keras 3, not {_keras.__version__}: pip install 'paceline[keras]'")

from paceline.keras.callbacks import Callbacks
from paceline.keras.data_shares import share
from paceline.keras.fit_callback import FitCallback as Pace

__all__ = ["Callbacks", "Pace", "share"]

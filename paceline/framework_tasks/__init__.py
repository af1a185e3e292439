"""Tasks of models that other frameworks than torch compute: JAX, Keras, TensorFlow."""

"""A worker that is several processes: batches are sliced, and the slices' gradients added up (docs/inside.md)."""

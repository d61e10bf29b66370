"""The fast path on CPUs: kernels in C++ (src/), and the models that run over them without transformers."""

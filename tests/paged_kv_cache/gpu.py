"""The same of CuPy and of torch: streams, and the way to the host."""


def to_host(array):
    return array.get() if hasattr(array, "get") else array.cpu().numpy()


def new_stream(module):
    return module.cuda.Stream() if module.__name__ == "torch" else module.cuda.Stream(non_blocking=True)


def on(module, stream):
    return module.cuda.stream(stream) if module.__name__ == "torch" else stream

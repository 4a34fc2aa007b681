from paddock import Client

env = await Client("http://127.0.0.1:8001").__aenter__()  # noqa: F704

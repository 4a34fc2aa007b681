from paddock import VectorClient as VectorClient

url = "http://127.0.0.1:8000"
action = {"amount": 3}
actions = [action] * 1000

from paddock.rollouts import Store

with Store.open(read_only=True) as store:
    record = store.list(finished=True)[0]

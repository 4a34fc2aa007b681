from paddock.rollouts import Store

with Store.open(read_only=True) as store:
    call = store.calls(store.list(finished=True)[0].rollout_id)[0]

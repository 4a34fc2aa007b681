"""verifiers: a tree of nodes."""

from export.rollouts import END, exported, forked


def test_branches_are_those_of_the_graph() -> None:
    (trace,) = exported("verifiers", forked())
    nodes = trace["nodes"]
    paths = []
    parents = {node["parent"] for node in nodes}
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path, current = [], leaf
        while current is not None:
            path.append(current)
            current = nodes[current]["parent"]
        paths.append([token for number in reversed(path) for token in nodes[number]["token_ids"]])
    assert [1, 2, 3, 100, 200, END, 60, 101, 201, END, 61, 102, 202, END] in paths
    assert [1, 2, 3, 100, 200, END, 77, 51, 52, END] in paths
    sampled = [node for node in nodes if node["sampled"]]
    assert [any(node["mask"]) for node in sampled] == [True, True, True, True, False, True, False]

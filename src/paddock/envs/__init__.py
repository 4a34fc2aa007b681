"""The environments shipped with Paddock, by the name `paddock serve` knows them under."""

SHIPPED = {
    "echo": "paddock.envs.echo:Echo",
    "counter": "paddock.envs.counter:Counter",
    "notes": "paddock.envs.notes:Notes",
    "opencode": "paddock.envs.opencode:OpenCodeEnvironment",
}

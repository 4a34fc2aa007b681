"""How agents speak to the proxy. One file for each dialect; none of them does IO."""

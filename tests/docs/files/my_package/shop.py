from paddock import ToolEnvironment, tool


class Shop(ToolEnvironment):
    concurrent_sessions = True

    @tool
    def price(self, article: str) -> float:
        """The price of an article."""
        return float(len(article))

"""Parts that the pages of ingot share: their design, and the guards of their servers."""

"""What a browser gets: a page to talk to the model and to watch the server, and the API's document.

Plain files of this package, served as they are: nothing is built, no other host is asked.
"""

from quire.api.page.files import PageFiles

__all__ = ["PageFiles"]

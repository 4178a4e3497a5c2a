"""A second decoder of kvpack 1, written from the text of this folder alone, in Python's standard library.

It shares no code with the library. Each module follows a page or a section, which its first line names, so that a question
about the text has an answer that runs. It is slow and keeps whole files in memory. ``python spec/decoder FILE`` describes a file.

Start with ``container.read``, which goes through a file in the order of the text. A module imports only modules behind it in this list:

- ``row``, ``container``: rows, and whole files;
- ``header``, ``newer``, ``ignorable``, ``json_header``, ``zstd``, ``xxh3``, ``msgpack``: the parts of a file;
- ``values``, ``given``: from the streams of a side to its values;
- ``codecs``: a module per codec;
- ``side_cars``, ``basis``: their pages;
- ``contents``, ``metadata``, ``token_ids``, ``norms``, ``codec``, ``directions``, ``rans``: what these share;
- ``rotation``, ``generator``, ``packing``, ``conventions``, ``features``, ``limits``, ``refusal``: what every page uses.
"""

from .container import read as read
from .contents import File as File
from .contents import Side as Side
from .refusal import Refused as Refused
from .row import Row as Row
from .row import read_row as read_row

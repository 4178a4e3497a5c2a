"""A second decoder of kvpack 1, written only from the text of this folder, in Python's standard library.

It shares no code with the library. The first line of each module names the page or section that it implements, so a question about the text
can be answered by running code. It is slow and keeps whole files in memory. ``python spec/decoder FILE`` describes a file.

Start with ``container.read``, which reads a file in the order of the text. A module imports only modules that follow it in this list:

- ``row``, ``container``: rows, and whole files;
- ``header``, ``newer``, ``ignorable``, ``json_header``, ``zstd``, ``xxh3``, ``msgpack``: the parts of a file;
- ``values``, ``basis_lookup``: from the streams of a layer's keys or values to the values;
- ``codecs``: a module per codec;
- ``sidecars``, ``basis``: the pages with these names;
- ``contents``, ``metadata``, ``token_ids``, ``norms``, ``codec``, ``directions``, ``rans``: what the modules above share;
- ``rotation``, ``generator``, ``packing``, ``conventions``, ``features``, ``limits``, ``refusal``: what all pages use.
"""

from .container import read as read
from .contents import File as File
from .contents import Side as Side
from .refusal import Refused as Refused
from .row import Row as Row
from .row import read_row as read_row

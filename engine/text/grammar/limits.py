"""All limits on the size and cost of a grammar. One that exceeds a limit is an error of its own request.

llguidance counts its work ("fuel") and gives up at a limit, so it needs no separate process that could be killed. What
its counters do not see (objects with thousands of members, texts of megabytes) is limited by size beforehand.
"""

MAX_GRAMMAR_BYTES = 128 << 10      # a schema as JSON, or a grammar
MAX_GBNF_BYTES = 32 << 10          # smaller, because it is translated in Python
MAX_REGEX_BYTES = 8 << 10          # 200 kB of literal text would take 1.5 s of one step
MAX_SCHEMA_DEPTH = 48              # nested objects and lists in the schema itself
MAX_SCHEMA_VALUES = 20_000
MAX_PROPERTIES = 512               # properties of one object: the work grows with their square
MAX_CHOICES = 2048
MAX_MULTIPLE = 10_000              # least common multiple of every `multipleOf`: a third prime takes minutes, uncounted
LEAST_NUMBER = -92 * 10**17        # near -2^63 and below, the library's ranges recurse until the stack ends the process
MAX_SUM_OF_MULTIPLES = 50_000      # half a second
MAX_CALLS_GRAMMAR_BYTES = 1 << 20  # a grammar of calls, made by the server from schemas within `max_tool_characters`

COMPILE_SECONDS = 10.0             # then the request is refused; the work itself ends by the counters below
COMPILE_THREADS = 2
CACHED_GRAMMARS = 128
CACHED_CHARACTERS = 16 << 20
SIDE_BY_SIDE = 4                   # from this many masks in a step on, several threads compute them

# The library's limits. For one grammar: regular expressions (50,000 a ms), lexer states (1-2 kB each) of all its
# matchers, and symbols. For one mask: lexer steps (14,000 a ms) and parser items (20,000 a ms).
LIBRARY = {"initial_lexer_fuel": 1_000_000, "max_lexer_states": 50_000, "max_grammar_size": 250_000,
           "step_lexer_fuel": 100_000, "step_max_items": 50_000, "verbose_errors": False}
REASON_CHARACTERS = 300            # length of the library's reason in the reply

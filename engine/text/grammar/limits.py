"""Every bound on what a grammar may be and cost. One that exceeds a bound is its own request's error.

llguidance counts its work ("fuel") and gives up, so its part is bounded without a process to kill. What its counters do
not see (objects with thousands of members, texts of megabytes) is bounded by size before it is asked.
"""

MAX_GRAMMAR_BYTES = 128 << 10      # of a schema as JSON, or of a grammar
MAX_GBNF_BYTES = 32 << 10          # translated in Python
MAX_REGEX_BYTES = 8 << 10          # 200 kB of literal text take 1.5 s of one step
MAX_SCHEMA_DEPTH = 48              # objects and lists inside one another, in the schema itself
MAX_SCHEMA_VALUES = 20_000
MAX_PROPERTIES = 512               # of one object: the work grows with the square
MAX_CHOICES = 2048
MAX_MULTIPLE = 10_000              # least common multiple of every `multipleOf`: a third prime takes minutes, uncounted
LEAST_NUMBER = -92 * 10**17        # near -2^63 and below, the library's ranges recurse until the stack ends the process
MAX_SUM_OF_MULTIPLES = 50_000      # half a second
MAX_CALLS_GRAMMAR_BYTES = 1 << 20  # of calls: made by the server, from schemas within `max_tool_characters`

COMPILE_SECONDS = 10.0             # then the request is refused; the work itself ends by the counters below
COMPILE_THREADS = 2
CACHED_GRAMMARS = 128
CACHED_CHARACTERS = 16 << 20
SIDE_BY_SIDE = 4                   # masks of a step from which on several threads compute them

# Of the library, for one grammar: regular expressions (50,000 a ms), lexer states (1-2 kB each) of all its matchers,
# and symbols; for one mask: lexer steps (14,000 a ms) and parser items (20,000 a ms).
LIBRARY = {"initial_lexer_fuel": 1_000_000, "max_lexer_states": 50_000, "max_grammar_size": 250_000,
           "step_lexer_fuel": 100_000, "step_max_items": 50_000, "verbose_errors": False}
REASON_CHARACTERS = 300            # of the library's reason, as a client sees it

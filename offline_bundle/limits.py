"""Every limit that an untrusted medium is held to. Sizes are in bytes. A part of install.sh."""

KIB = 1024
MIB = 1024 * KIB

MAX_SIGNATURE = 4 * MIB  # read before anything is trusted, hence the tightest
MAX_MANIFEST = 32 * MIB  # about 0.5 M chunk hashes: 30 TiB of weights
MAX_KEY_FILE = 64 * KIB
MAX_SMALL_FILE = 1 * MIB  # an answers file, a record of this server
MAX_JOURNAL = 64 * MIB
MAX_FILES = 4096
MAX_PATH = 240  # bytes; leaves room for the store's prefix on file systems with a 255-byte name limit
MAX_NAME = 128  # bytes of one path component
MAX_DEPTH = 4  # components: model/additional_chat_templates/x.jinja is 3
MAX_FILE_SIZE = 1 << 50
MAX_PARSED = 16 * MIB  # JSON that is parsed; in memory a parsed document takes about ten times its text
# Text files by role; the largest real tokenizer.json has about 35 MiB. They are checked in blocks of BLOCK.
MAX_TEXT = {
    "license": 1 * MIB, "template": 1 * MIB, "doc": 4 * MIB, "config": MAX_PARSED, "sbom": MAX_PARSED,
    "tokenizer": 64 * MIB,
}  # fmt: skip
BLOCK = 1 * MIB
MAX_SAFETENSORS_HEADER = 100_000_000  # the bound of the safetensors format itself
MAX_TENSOR_DIMS = 16
MAX_SEQUENCE = (1 << 53) - 1  # every integer in bundle.json stays exact in any JSON reader

MIN_CHUNK = 64 * KIB
MAX_CHUNK = 256 * MIB
DEFAULT_CHUNK = 64 * MIB

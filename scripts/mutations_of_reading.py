"""What a load asks of index and files before a byte of them is used, one by one."""

from __future__ import annotations

from mutation import Mutation, checkpoint, crash, cut

INDEX = checkpoint("layout")
PAGE = checkpoint("format_page")
GATE = checkpoint("gate")
SPARSE = checkpoint("hostile", "row_8_a_sparse_file_is_never_hashed")
SPECIAL = checkpoint("hostile", "rows_6_and_7_what_is_no_file")

READING = (
    cut("size of a file", "gate.py", "    if size != entry.size:", "    if False:", SPARSE),
    cut(
        "hash of a file",
        "gate.py",
        "    if digest.hexdigest() != entry.sha256:",
        "    if False:",
        GATE,
    ),
    cut(
        "a file that changes while it is read",
        "gate.py",
        "        if seen != before:",
        "        if False:",
        checkpoint("races", "a_file_whose_bytes_change_while_it_is_read_is_not_used"),
    ),
    cut(
        "no link is followed when reading",
        "gate.py",
        "_READ = os.O_RDONLY | os.O_NOFOLLOW |",
        "_READ = os.O_RDONLY |",
        GATE,
    ),
    cut(
        "no FIFO is waited for",
        "gate.py",
        "os.O_NONBLOCK |",
        "0 |",
        SPECIAL,
    ),
    cut(
        "regular files only",
        "gate.py",
        "    if not stat.S_ISREG(os.fstat(fd).st_mode):",
        "    if False:",
        SPECIAL,
    ),
    cut("length of an index", "gate.py", "    if len(data) > MAX_INDEX_BYTES:", "    if False:", GATE),
    cut(
        "canonical form, doubled keys",
        "layout.py",
        "    if not same or type(content) is not dict:",
        "    if type(content) is not dict:",
        INDEX,
    ),
    Mutation(
        "no NaN in an index",
        "layout.py",
        (
            ("parse_constant=_no_constant", "parse_constant=None"),
            ("ensure_ascii=True, allow_nan=False", "ensure_ascii=True"),
        ),
        (INDEX, PAGE),
    ),
    cut(
        "hash of the index",
        "layout.py",
        '    if found != wanted:\n        _corrupt(name, "index_sha256"',
        '    if False:\n        _corrupt(name, "index_sha256"',
        INDEX,
    ),
    cut(
        "signature",
        "layout.py",
        "    if type(found) is str and hmac.compare_digest(found.encode(), _signature(content, key).encode()):",
        "    if type(found) is str:",
        PAGE,
    ),
    cut(
        "a signature must be there",
        "layout.py",
        "        _check_signature(content, signature, hmac_key, name)",
        "        if signature is not None:\n            _check_signature(content, signature, hmac_key, name)",
        PAGE,
    ),
    cut(
        "form of a signature without a key",
        "layout.py",
        "        _hex(signature, 64, name, _SIGNATURE)",
        "        pass",
        PAGE,
    ),
    cut(
        "a newer schema is no damage",
        "layout.py",
        '    if isinstance(schema, str) and re.fullmatch(r"resumable_data\\.index\\.v',
        '    if False and re.fullmatch(r"resumable_data\\.index\\.v',
        PAGE,
    ),
    cut(
        "keys of the index",
        "layout.py",
        '    if content.keys() | {"index_sha256"} != _REQUIRED:',
        '    if content.keys() | {"index_sha256"} < _REQUIRED:',
        INDEX,
    ),
    cut(
        "no bool for an int",
        "layout.py",
        "    if type(value) is not int or not low <= value <= high:",
        "    if not isinstance(value, int) or not low <= value <= high:",
        PAGE,
    ),
    cut(
        "ranges of numbers",
        "layout.py",
        "    if type(value) is not int or not low <= value <= high:",
        "    if type(value) is not int:",
        INDEX,
    ),
    cut(
        "form of a hash",
        "layout.py",
        '    if type(value) is not str or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):',
        "    if type(value) is not str:",
        INDEX,
    ),
    cut(
        "an index of its own place",
        "layout.py",
        "    if place != expected:",
        "    if False:",
        INDEX,
        PAGE,
    ),
    cut(
        "names of files",
        "layout.py",
        "        if own == index.name if single else own == META or _SHARD.fullmatch(own):",
        "        if True:",
        INDEX,
    ),
    cut(
        "each file once and in order",
        "layout.py",
        '    if found != wanted:\n        _corrupt(name, "files"',
        '    if False:\n        _corrupt(name, "files"',
        INDEX,
    ),
    cut("step of the payload", "store.py", "type(step) is not int or step != entry.step", "False", PAGE),
    cut(
        "a mark is heeded",
        "store.py",
        "        if entry.marked is not None:\n            skipped",
        "        if False:\n            skipped",
        PAGE,
    ),
    cut(
        "runs before steps",
        "layout.py",
        "        return self.run_ordinal, self.step, self.generation",
        "        return 0, self.step, self.generation",
        checkpoint("manager", "a_new_run_at_lower_steps_in_an_old_directory_is_the_newest"),
    ),
    cut(
        "no run starts afresh beside damage",
        "store.py",
        "            if skipped:\n                raise",
        "            if False:\n                raise",
        crash("corruption", "when_all_are_damaged_no_run_starts_afresh"),
    ),
    cut(
        "a missing part is damage",
        "store.py",
        "            if self._is_there(entry.name):  # pruning",
        "            if False:  # pruning",
        crash("corruption", "a_missing_file"),
    ),
    cut(
        "no key in two shards",
        "sharding.py",
        "        if not found.keys().isdisjoint(content):",
        "        if False:",
        checkpoint("sharding"),
        PAGE,
    ),
    cut(
        "shards hold the keys dealt to them",
        "sharding.py",
        "    if found != numbers or any(type(number) is not int for number in numbers.values()):",
        "    if False:",
        checkpoint("sharding"),
        PAGE,
    ),
    cut(
        "one value, in the shard",
        "sharding.py",
        "    if any(model[key] is not None for key in numbers):",
        "    if False:",
        checkpoint("sharding"),
    ),
)

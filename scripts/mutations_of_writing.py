"""What a save and a deletion do for the sake of a crash, one by one."""

from __future__ import annotations

from mutation import Mutation, checkpoint, crash, cut, power_cut

SECOND, SECOND_SHARDED = power_cut("a second save"), power_cut("a second save", "sharded")
REPLACED, REPLACED_SHARDED = (
    power_cut("the only one kept is replaced", form) for form in ("single", "sharded")
)
FILE = crash("simulated_crashes", "a_power_cut_after_any_call_of_a_single_file")
FAILS = crash("injected_errors", "each_call_fails_once")
SYNC_FAILS = crash("injected_errors", "a_failed_sync_of_the_directory_fails_the_save")
PAGE = checkpoint("format_page")
RETENTION = checkpoint("retention")

WRITING = (
    cut("fsync of a file", "sink.py", "            self._ops.fsync(self._fd)", "            pass", SECOND),
    cut(
        "a failed fsync is final",
        "sink.py",
        "            self._ops.fsync(self._fd)",
        "            try:\n                self._ops.fsync(self._fd)\n"
        "            except OSError:\n                self._ops.fsync(self._fd)",
        crash("injected_errors", "a_failed_fsync_is_never_tried_again_and_the_next_save_writes_a_new_file"),
    ),
    Mutation(
        "fsync before rename, not after",
        "atomic.py",
        (
            (
                "        sink = Sink(self._ops, fd, durable=self._durable)",
                "        sink = Sink(self._ops, fd, durable=False)",
            ),
            (
                "        self._ops.rename(str(written.temp), str(target))\n",
                "        self._ops.rename(str(written.temp), str(target))\n"
                "        late = self._ops.open(str(target), os.O_RDONLY)\n"
                "        self._ops.fsync(late)\n        self._ops.close(late)\n",
            ),
        ),
        (SECOND, FILE),
    ),
    cut(
        "fsync of the directory",
        "atomic.py",
        "            sync_directory(self.directory, self._ops)",
        "            pass",
        SECOND,
    ),
    cut(
        "fsync of the directory between the two renames",
        "committing.py",
        "            files.rename(written)\n            files.sync()",
        "            files.rename(written)\n        files.sync()",
        SECOND,
    ),
    cut(
        "fsync of the directory after the commit",
        "committing.py",
        "            files.rename(written)\n            files.sync()",
        "            files.rename(written)\n            if written is index:\n                files.sync()",
        SECOND,
        SYNC_FAILS,
    ),
    cut(
        "fsync of a shard directory's names",
        "committing.py",
        "    files.sync_inside(temp)\n",
        "",
        SECOND_SHARDED,
    ),
    cut(
        "fsync of the directory after a shard directory's rename",
        "committing.py",
        "        files.rename_directory(temp, name)  # the commit point\n        files.sync()",
        "        files.rename_directory(temp, name)  # the commit point",
        SECOND_SHARDED,
        SYNC_FAILS,
    ),
    cut(
        "fsync of the directory after a mark",
        "committing.py",
        "        files.rename(files.write(name, _putting(content)))\n        files.sync()",
        "        files.rename(files.write(name, _putting(content)))",
        power_cut("the newest is marked as bad"),
    ),
    cut(
        "fsync of the directory after a single file",
        "atomic.py",
        "        commit.rename(commit.write(path.name, produce))\n        commit.sync()",
        "        commit.rename(commit.write(path.name, produce))",
        FILE,
    ),
    cut(
        "fsync above a new directory",
        "atomic.py",
        "            sync_directory(place.parent, ops)",
        "            pass",
        power_cut("the very first save"),
    ),
    cut(
        "fsync after pruning by hand",
        "session.py",
        "            self._prune(store, policy)\n            store.sync()",
        "            self._prune(store, policy)",
        checkpoint("order_of_calls"),
    ),
    cut(
        "the index is in place before the data",
        "committing.py",
        "for written in (index, data):",
        "for written in (data, index):",
        SECOND,
    ),
    cut(
        "the shards are in place before their name",
        "committing.py",
        '    temp = files.temp_directory(layout.file_name(stamp.step, stamp.generation, "dir"))',
        '    temp = files.directory / layout.file_name(stamp.step, stamp.generation, "dir")\n'
        "    ops.mkdir(str(temp))",
        SECOND_SHARDED,
    ),
    cut(
        "the pointer comes after the commit",
        "session.py",
        "        entry = store.commit(payload, stamp)\n",
        '        kind = "single" if store.form.shards is None else "sharded"\n'
        "        store.point_to(layout.Index(*run, step, stamp.generation, metrics, (), kind))\n"
        "        entry = store.commit(payload, stamp)\n",
        SECOND,
    ),
    cut(
        "pruning comes after the commit",
        "session.py",
        "                index = self._commit(store, payload, step, metrics)\n",
        "                pruning.prune(store, self.ledger, Policy(0), [])\n"
        "                index = self._commit(store, payload, step, metrics)\n",
        REPLACED,
        crash("injected_errors", "the_only_checkpoint_stays_while_saves_fail"),
    ),
    Mutation(
        "data goes before its index",
        "store.py",
        (
            (
                "        committing.remove(self.directory, self.ops, entry.name)\n        kinds",
                "        kinds",
            ),
            (
                "                self.ops.unlink(str(path))\n\n    def sync",
                "                self.ops.unlink(str(path))\n"
                "        committing.remove(self.directory, self.ops, entry.name)\n\n    def sync",
            ),
        ),
        (REPLACED,),
    ),
    cut(
        "a mark goes last",
        "store.py",
        "        committing.remove(self.directory, self.ops, entry.name)\n        kinds",
        '        mark = layout.file_name(entry.step, entry.generation, "bad.json")\n'
        "        if entry.marked is not None:\n            self.ops.unlink(str(self.directory / mark))\n"
        "        committing.remove(self.directory, self.ops, entry.name)\n        kinds",
        checkpoint("order_of_calls"),
    ),
    cut(
        "what goes is renamed first",
        "committing.py",
        "    ops.rename(str(directory / name), str(directory / grave))\n    bury(directory, ops, grave)",
        "    bury(directory, ops, name)",
        REPLACED_SHARDED,
    ),
    cut(
        "a failed commit is taken back",
        "committing.py",
        "        for path in reversed(placed):",
        "        for path in ():",
        FAILS,
        SYNC_FAILS,
    ),
    cut(
        "temporary files of a failed save go",
        "atomic.py",
        "        for temp in self._temps:",
        "        for temp in ():",
        FAILS,
    ),
    cut(
        "files are created anew",
        "atomic.py",
        "os.O_CREAT | os.O_EXCL |",
        "os.O_CREAT |",
        checkpoint("atomic"),
    ),
    cut(
        "no link is followed when writing",
        "atomic.py",
        "os.O_EXCL | os.O_NOFOLLOW",
        "0",
        checkpoint("atomic"),
    ),
    cut(
        "short writes are completed",
        "sink.py",
        "            view = view[count:]",
        "            return",
        crash("injected_errors", "short_writes_are_completed"),
        checkpoint("atomic"),
    ),
    cut(
        "no generation is used twice",
        "session.py",
        "max(store.generations(step, store.names()), default=-1) + 1",
        "0",
        checkpoint("manager", "the_same_step_twice_is_two_generations_and_the_newer_one_stays"),
    ),
    cut(
        "a new run is above all others",
        "session.py",
        "store.largest_ordinal() + 1",
        "1",
        checkpoint("manager", "a_new_run_at_lower_steps_in_an_old_directory_is_the_newest"),
    ),
    cut(
        "one writer at a time",
        "lock.py",
        "        try:\n            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        try:\n            pass",
        checkpoint("manager", "a_second_writer_is_refused_naming_the_first_and_readers_are_not"),
    ),
    cut(
        "temporary files of the living stay",
        "temps.py",
        '    return here and not _is_running(int(found["pid"]), int(found["start"]))',
        "    return here",
        checkpoint("atomic", "temps_of_the_dead_are_swept_and_of_the_living_left"),
    ),
    cut(
        "files of others in a shard directory stay",
        "committing.py",
        "    for name in filter(layout.is_member, names):",
        "    for name in names:",
        PAGE,
    ),
    cut(
        "what changed does not count",
        "pruning.py",
        "known is not None and known == (entry.index, store.seen(entry))",
        "known is not None",
        checkpoint("manager", "a_checkpoint_that_rotted_after_its_save_does_not_count"),
    ),
    cut(
        "only what is known to be whole counts",
        "retention.py",
        "            elif record.counted and not record.marked:",
        "            elif not record.marked:",
        RETENTION,
    ),
    cut(
        "what is marked does not count",
        "retention.py",
        "            elif record.counted and not record.marked:",
        "            elif record.counted:",
        RETENTION,
        checkpoint("best"),
    ),
    cut(
        "the best stays",
        "retention.py",
        "        kept = {self.best(readable), self.best(r for r in readable if r.counted)}",
        "        kept = {None}",
        RETENTION,
    ),
    cut(
        "what is not finite is never best",
        "retention.py",
        "            and math.isfinite(record.metric)\n",
        "",
        RETENTION,
    ),
    cut(
        "a copy is hashed on its way",
        "transfer.py",
        "    if (written.size, written.sha256) != (entry.size, entry.sha256):",
        "    if False:",
        checkpoint("transfer"),
    ),
    cut(
        "a copy overwrites nothing",
        "transfer.py",
        "            path = _present(there, index)\n",
        "            path = None\n",
        checkpoint("transfer"),
    ),
)

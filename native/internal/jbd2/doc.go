// Package jbd2 is the writer's side of ext4's journal: changes of metadata blocks
// gather in one running transaction, are written to the log as a whole, and go to
// their places later. It knows neither gVisor nor ext4: a Device, the list of
// blocks the log lies in, and blocks of bytes that somebody else keeps in memory.
// Recovery is not here: a log that is not empty is refused (ext4lite replays it).
// The format is Documentation/filesystems/ext4/journal.rst.
//
// # Life of a change
//
// Begin gives a Handle: one operation, all of it in one transaction. Handle.Get
// announces that a Block's bytes are going to change, Handle.Forget that a block
// was freed (it is revoked: nothing older may be replayed over its next use).
// Begin names the most blocks the operation will touch, so that a transaction
// never outgrows a quarter of the log.
//
// Commit waits for the handles of the running transaction, calls
// Config.BeforeCommit with nobody at work, and puts a new transaction in its
// place: operations go on while the old one is written. A block that the new one
// wants to change and whose bytes are not in the log's buffer yet is copied first.
// On disk, each | a Flush (without Config.Durable there is none, only the order):
//
//	revokes, descriptors, blocks | commit block | Config.AfterCommit
//	… later, in place: blocks | the log's new tail | space for new transactions
//
// The first flush covers the data that callers wrote before, too: that is what
// makes it ordered. AfterCommit is the moment at which what the transaction freed
// may be used again, and not before: no checkpoint writes to it any more either.
//
// Checkpointing runs beside all that when half of the log is in use. A block that
// has changed since is read back from the log, so it waits for no transaction.
//
// After an error nothing more is committed nor checkpointed, every call fails, and
// the journal's superblock notes it if it still can.
//
// # Locks, in order
//
//	commitMu   one commit at a time
//	barrier    shared by handles, exclusively while transactions change places
//	cpMu       one checkpoint at a time
//	cpIO       a batch of blocks on its way from the log to its place
//	mu         everything in memory
//	sbMu       the journal's superblock
package jbd2

// Package events is the log of facts between the services.
//
// It owns the tables events.event and events.numbered, the order of events, and how they are read: cursors, waiting,
// parking. A row counts only once its transaction has committed, and gets its place in the order (its position) only
// then. It never notifies inside a business transaction (that serialises all commits), never reads by the sequence
// drawn at insert (that loses rows which commit late), never changes an event, and never stops at one that cannot be
// applied.
//
//	business tx:  UPDATE row … INSERT event … COMMIT ──► Wake
//	sequencer:    lock, INSERT one row that numbers what is committed, by seq,
//	              COMMIT ──► Numbered, and NOTIFY in a tx of its own
//	consumer:     read positions above the cursor, apply and move the cursor in one tx ──► Advanced
//
// Guarantees: positions have no holes but the jump at a new era; a reader that follows them meets every committed event
// exactly once; two events of one aggregate have the order of their commits, given that the event is inserted after the
// row's update; a consumer's effect in the database and its cursor move together or not at all. Any number of
// sequencers and of replicas of a consumer may run at once.
//
// A row of events.numbered is the result of one round of a sequencer: the set of seqs that it numbered and their
// positions, and the set of seqs that may still commit, from which the next round of any sequencer goes on. Which seqs
// may still commit is derived from transaction ids and never from the time: a transaction has its id before it draws a
// seq, so a transaction whose seq a round has seen has an id below that of the next round's row; once all transactions
// with ids below that one have ended, the seqs up to there that no round numbered will never commit. A sequencer keeps
// no state in memory, so a restored database needs no special handling. A transaction that stays open keeps open the
// seqs that were rolled back meanwhile, one range for each; rounds become slower with their number, not with the number
// of seqs that were numbered.
//
// The log is partitioned by day: the seqs of a day begin at its number since 1970, times 2^32. Whole rows of
// events.numbered are cut once their last_pos is at or below every cursor and their events are over their term, the
// newest row excepted; a day's partition is dropped when no row names one of its events or leaves one open. A watcher's
// resume token below the rows that are left is refused as a position that the log does not have.
package events

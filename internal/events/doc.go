// Package events is the log of facts between the services.
//
// It owns the tables events.event and events.numbered, the order of events, and how they are read: cursors, waiting,
// parking. It believes a row only once its transaction has committed, and gives it its place in the order (its position)
// only then. It never notifies inside a business transaction (that serialises all commits), never reads by the sequence
// drawn at insert (that loses rows which commit late), never changes an event, and never stops at one that cannot be
// applied.
//
//	business tx:  UPDATE row … INSERT event … COMMIT ──► Wake
//	sequencer:    lock, INSERT one row that numbers what is committed, by seq, COMMIT ──► Numbered, and NOTIFY in a tx of its own
//	consumer:     read positions above the cursor, apply and move the cursor in one tx ──► Advanced
//
// Guarantees: positions have no holes but the jump at a new era; a reader that follows them meets every committed event
// exactly once; two events of one aggregate have the order of their commits, given that the event is inserted after the
// row's update; a consumer's effect in the database and its cursor move together or not at all. Any number of
// sequencers and of replicas of a consumer may run at once.
//
// A row of events.numbered is what one round of a sequencer did: the set of seqs that it numbered and the positions that
// they have, and the set of those that may still come, from which the next round goes on, whoever does it. What may come
// is found from transaction ids and never from the time: a transaction has its id before it draws a seq, so whoever drew
// a seq that a round has seen has an id below that of the next round's row; once all ids below that one have ended, the
// seqs up to there that no round took are nobody's. A sequencer remembers nothing, so a database that was restored under
// it is none of its concerns. A transaction that stays open keeps open the seqs that were rolled back meanwhile, a range
// each; rounds grow slower by them, not by what was numbered.
//
// The log is partitioned by day: the seqs of a day begin at its number since 1970, times 2^32. Whole rows of
// events.numbered are cut once their last_pos is at or below every cursor and their events are over their term, the newest
// row excepted; a day's partition is dropped when no row names one of its events, nor leaves one open. Watchers' resume
// tokens below what is left are refused as positions that the log does not have.
package events

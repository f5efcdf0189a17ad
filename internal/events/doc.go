// Package events is the log of facts between the services.
//
// It owns the table events.event, the order of its rows, and how they are read: cursors, waiting, parking. It believes a
// row only once its transaction has committed, and gives it its place in the order (pos) only then. It never notifies
// inside a business transaction (that serialises all commits), never reads by the sequence drawn at insert (that loses
// rows which commit late), and never stops at an event that cannot be applied.
//
//	business tx:  UPDATE row … INSERT event (pos null) … COMMIT ──► Wake
//	sequencer:    lock, number the committed rows in order of seq, COMMIT ──► Numbered, and NOTIFY in a tx of its own
//	consumer:     read pos > cursor, apply and move the cursor in one tx ──► Advanced
//
// Guarantees: pos has no holes but the jump at a new era; a reader that follows `pos > cursor` meets every committed event
// exactly once; two events of one aggregate have the order of their commits, given that the event is inserted after the
// row's update; a consumer's effect in the database and its cursor move together or not at all. Any number of
// sequencers and of replicas of a consumer may run at once.
package events

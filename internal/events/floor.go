package events

import "time"

// floor is a seq below which nothing unnumbered can be or come any more. Every numbered row leaves a dead entry in the index of unnumbered ones; without a
// floor each round walks over all that have not been vacuumed, and a busy hour makes every round slower than the last.
//
// It is found from transaction ids. A transaction has its id before it draws a seq, since it has changed a row by then. So whoever has drawn a seq up to
// some highest one that was seen has an id below one that is assigned afterwards; once a snapshot says that all ids below that one have ended, their rows
// are in the snapshot or will never be, and a round that took all that its snapshot held has numbered them. Nothing is judged by time but how often the
// whole index is looked at all the same.
type floor struct {
	seq     int64
	highest int64 // seq seen so far
	marks   []mark
	whole   time.Time // when the whole index was last looked at
}

// mark: every transaction that drew a seq up to seq has an id below xid.
type mark struct {
	xid uint64
	seq int64
}

const (
	// wholeEvery is how often the floor is left aside: a database that was restored under a running process may count from below it.
	wholeEvery = 10 * time.Second
	// marksKept bounds the marks that wait for old transactions.
	marksKept = 256
)

// at answers the seq above which a round that begins now looks.
func (f *floor) at(now time.Time) int64 {
	if now.Sub(f.whole) >= wholeEvery {
		f.whole = now
		return 0
	}
	return f.seq
}

// saw learns from a round that committed: xid is its own id, oldest the oldest id that ran in the snapshot that it numbered by, highest the highest seq
// that it numbered, and full says that it may have left some behind.
func (f *floor) saw(xid, oldest uint64, highest int64, full bool) {
	// What was seen before this round had its id before this round had its own.
	if f.highest > 0 && len(f.marks) < marksKept {
		f.marks = append(f.marks, mark{xid: xid, seq: f.highest})
	}
	f.highest = max(f.highest, highest)
	if full {
		return
	}
	done := 0
	for _, m := range f.marks {
		if m.xid > oldest {
			break
		}
		f.seq = max(f.seq, m.seq)
		done++
	}
	f.marks = append(f.marks[:0], f.marks[done:]...)
}

// Package watch serves live views: a snapshot, then every change, each with a token to resume from.
//
// It owns the fan-out in this process and its subscriptions, all of them bounded, and stores nothing. It takes the
// event log up to the cursor of the projections as the list of what changed, whichever replica projected it, and reads
// the objects as they are now.
//
//	projection commits ──► signal, or poll ──► Hub: log (last, cursor] → changed objects → load once
//	    ──► subscription: newest of each object ──► stream
//
// Guarantees: a watcher that resumes from a token misses no later state of any object that an event made; an object is
// sent at most four times a second, beside what changes with the time alone, and its last state always; a subscription
// holds at most one state of each object and a bounded number of them, and a watcher that falls further behind is asked
// to take a new snapshot; a stream ends within five seconds after its person's session ended; a person of a tenant sees
// only that tenant's objects.
package watch

// Package watch keeps people's live views: a snapshot, then every change, each with a token to resume from.
//
// It owns the fan-out in this process and its subscriptions, all of them bounded, and stores nothing. It believes the event log up to the cursor of the
// projections as the list of what changed, whichever replica projected it, and reads the objects as they are now.
//
//	projection commits ──► signal, or poll ──► Hub: log (last, cursor] → changed objects → load once ──► subscription: newest of each object ──► stream
//
// Guarantees: whoever holds a token and shows it again misses no later state of any object; an object is sent at most four times a second, the last
// state always; a subscription holds at most one state an object and a bounded number of them, and one that falls further behind is told to take a new
// snapshot; a stream ends within five seconds after its person's session did; a person of a tenant meets that tenant's objects only.
package watch

// Package outbox is the one queue of the frames that an agent sends: it bounds them, drops those that later frames make
// superfluous, and decides in which order they leave.
//
// It does not send: the writer of the admitted session takes frames with Next. Nothing is queued while no session is
// admitted, and the end of a session drops what waits, since the executor queues unacknowledged reports again from the
// ledger.
package outbox

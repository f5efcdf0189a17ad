package saga

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// TxFunc writes a step's own rows in the transaction that ends or parks its attempt. The lease is confirmed before it
// is called. It may run more than once (a serialization failure), so it has no effect outside tx.
type TxFunc func(ctx context.Context, tx pgx.Tx) error

// outcomeKind classifies outcomes. The zero value is that of a step that returned neither a Done nor a Wait.
type outcomeKind int

const (
	outcomeDone outcomeKind = iota + 1
	outcomeWait
)

// Outcome is the result of a step's function that did not return an error.
type Outcome struct {
	kind   outcomeKind
	output any
	rows   Writes
	wait   WaitFor
}

// Writes are the functions that write a step's own rows: Before takes the locks that come before a run in the order of
// locks, and Rows writes.
type Writes struct{ Before, Rows []TxFunc }

// Empty reports whether there is nothing to write.
func (w Writes) Empty() bool { return len(w.Rows) == 0 }

// After returns the outcome with locks that its rows need and that come before the run's in the order of locks: those
// of gates and tasks. lock is called before the run is locked and the lease confirmed.
func (o Outcome) After(lock TxFunc) Outcome {
	o.rows.Before = append(slices.Clip(o.rows.Before), lock)
	return o
}

// Done ends the attempt as succeeded. output (marshalled as JSON, nil for none) is what later steps read; rows are
// written with the end.
func Done(output any, rows ...TxFunc) Outcome {
	return Outcome{kind: outcomeDone, output: output, rows: Writes{Rows: rows}}
}

// WaitFor describes how long a parked attempt waits, and for what.
type WaitFor struct {
	// For is how long to wait before the step's function is called again, from now by the database's clock.
	For time.Duration
	// Why is shown while the attempt waits. Empty takes a default text.
	Why string
	// WakeOnSignal lets Wake end the wait early. A signal that came since this attempt's function was called ends it at
	// once.
	WakeOnSignal bool
	// Meanwhile is an error that is shown with the attempt while it waits, until a later wait replaces it or the attempt
	// ends. It does not end the attempt. May be nil.
	Meanwhile *StepError
}

// Wait parks the attempt and frees the worker; the same function is called again for the same attempt. rows are written
// with the park.
func Wait(w WaitFor, rows ...TxFunc) Outcome {
	return Outcome{kind: outcomeWait, wait: w, rows: Writes{Rows: rows}}
}

// Waits reports whether the outcome parks the attempt.
func (o Outcome) Waits() bool { return o.kind == outcomeWait }

// Ends reports whether the outcome ends the attempt as succeeded. The zero Outcome neither ends nor parks it.
func (o Outcome) Ends() bool { return o.kind == outcomeDone }

// Output returns what later steps read.
func (o Outcome) Output() any { return o.output }

// Writes returns what is written with the end of the attempt, or with its park.
func (o Outcome) Writes() Writes { return o.rows }

// WaitsFor returns how long an outcome parks the attempt, and for what.
func (o Outcome) WaitsFor() WaitFor { return o.wait }

// Why returns the reason for which an outcome parks the attempt.
func (o Outcome) Why() string { return o.wait.Why }

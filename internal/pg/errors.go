package pg

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATE codes by which this package decides.
const (
	codeUnique        = "23505"
	codeSerialization = "40001"
	codeDeadlock      = "40P01"
	codeReadOnly      = "25006"
	codeInternal      = "XX000"
)

// IsNoRows reports whether a single-row query found nothing: for a compare-and-set, a lost race.
func IsNoRows(err error) bool { return errors.Is(err, pgx.ErrNoRows) }

// IsUnique reports whether err is the violation of a unique index or constraint; an empty constraint means any.
func IsUnique(err error, constraint string) bool { return violates(err, codeUnique, constraint) }

func violates(err error, code, constraint string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code && (constraint == "" || pgErr.ConstraintName == constraint)
}

// IsRetryable reports whether the server rolled the transaction back for reasons of concurrency; the same transaction
// may succeed if it is run again.
func IsRetryable(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	switch pgErr.Code {
	case codeSerialization, codeDeadlock:
		return true
	case codeInternal:
		// "tuple concurrently updated": two statements changed one row of a catalogue, such as the grants of a database.
		return pgErr.Routine == "simple_heap_update" || pgErr.Routine == "simple_heap_delete"
	}
	return false
}

// IsConnError reports whether the database could not be reached, hung up, is starting, stopping or full, or has become
// a read-only standby: nothing is wrong with the request, and waiting helps. The end of the caller's own context is no
// such error.
func IsConnError(err error) bool {
	if err == nil {
		return false
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		// 08: connection; 53: resources; 57P: shutdown, crash, starting up; 58: the server's own I/O.
		for _, class := range []string{"08", "53", "57P", "58"} {
			if strings.HasPrefix(pgErr.Code, class) {
				return true
			}
		}
		return pgErr.Code == codeReadOnly
	}
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) {
		return true
	}
	// Each error number of the system is a net.Error, so that of a file would count.
	var fileErr *fs.PathError
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &fileErr) {
		return false
	}
	var netErr net.Error
	return errors.As(err, &netErr) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, pgconn.ErrConnClosed)
}

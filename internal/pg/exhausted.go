package pg

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// SQLSTATE codes of class 53, insufficient resources.
const (
	classResources      = "53"
	codeDiskFull        = "53100"
	codeOutOfMemory     = "53200"
	codeTooManyConns    = "53300"
	exhaustionKept      = 30 * time.Second
	exhaustedRetryAfter = 5 * time.Second
)

// Exhaustion remembers that the server refused something for want of a resource. A ping does not find that: reads
// succeed while every write is refused. The zero value is ready for use.
type Exhaustion struct {
	mu   sync.Mutex
	code string
	at   time.Time
}

func (e *Exhaustion) note(code string) {
	if e == nil || !strings.HasPrefix(code, classResources) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.code, e.at = code, time.Now()
}

// Check returns the fault of the last refusal for 30 s after it, then nil. It is a check of obs.Health.
func (e *Exhaustion) Check(context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.code == "" || time.Since(e.at) > exhaustionKept {
		return nil
	}
	return exhausted(e.code, nil)
}

// exhausted returns the fault of a code of class 53.
func exhausted(code string, cause error) error {
	public, remedy := "the database lacks a resource", "look at the database server's log for the resource that it lacks"
	switch code {
	case codeDiskFull:
		public = "the database has no disk space left"
		remedy = "free space on the volumes of the database and of its write-ahead log; what was acknowledged is kept, " +
			"and running workloads go on"
	case codeOutOfMemory:
		public, remedy = "the database has no memory left",
			"give the database server more memory, or lower its work_mem and max_connections"
	case codeTooManyConns:
		public = "the database takes no more connections"
		remedy = "raise the server's max_connections, or lower database_conns of the services"
	}
	opts := []fault.Option{fault.Remedy(remedy), fault.RetryAfter(exhaustedRetryAfter)}
	if cause != nil {
		opts = append(opts, fault.Cause(cause))
	}
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, public, opts...)
}

// Fault returns a typed error (unavailable, with a remedy) for an error whose cause is the state of the database. Any
// other error, and one that is typed already, is returned as it is.
func Fault(err error) error {
	if _, typed := fault.As(err); err == nil || typed {
		return err
	}
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && strings.HasPrefix(pgErr.Code, classResources):
		return exhausted(pgErr.Code, err)
	case IsConnError(err):
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the database is not available", fault.RetryAfter(time.Second),
			fault.Cause(err))
	default:
		return err
	}
}

package people

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
)

// Session is a session of a person, whose token the caller has presented.
type Session struct {
	ID        string
	Person    rpc.Person
	ExpiresAt time.Time

	endedAt    *time.Time // nil unless it was ended or replaced
	replacedAt *time.Time // nil unless it ended and the same person got another later
	expired    bool
}

// Sessions issues, checks and ends the sessions of people.
type Sessions struct {
	db   pg.Querier
	rows together[sessionRow] // rows that several calls wait for at the same time are read by one statement

	mu       sync.Mutex
	rechecks map[string]map[chan struct{}]bool // of the watches of this replica, by subject
}

// NewSessions returns Sessions over readmodel's database.
func NewSessions(db pg.Querier) *Sessions {
	s := &Sessions{db: db, rechecks: map[string]map[chan struct{}]bool{}}
	s.rows.read = s.readRows
	return s
}

// IssueSession makes a session that belongs to no listed person and returns its token, which is stored nowhere.
// tenantID is empty for people of the operator; ttl is at most thirty days. db logs in as readmodel or the owner. The
// caller has authenticated the person. Admit creates a listed person.
func IssueSession(ctx context.Context, db pg.Querier, subject, tenantID string, roles []string,
	ttl time.Duration,
) (string, error) {
	return issue(ctx, db, nil, subject, tenantID, roles, ttl)
}

var newSession = pg.Define(pg.RoleReadmodel, "people.insert_session", `
	INSERT INTO readmodel.person_session (session_id, token_sha256, subject, tenant_id, roles, expires_at, person_id)
	VALUES ($1::uuid, $2, $3, $4::uuid, $5, mesh.clock() + $6::interval, $7::uuid)`)

// issue inserts a session and returns its token; personID is nil if the session belongs to no listed person.
func issue(ctx context.Context, db pg.Querier, personID any, subject, tenantID string, roles []string,
	ttl time.Duration,
) (string, error) {
	if subject == "" || len(roles) == 0 || ttl <= 0 || ttl > sessionMax {
		return "", errors.New("issue session: a subject, a role and a life of at most thirty days are needed")
	}
	for _, role := range roles {
		if !slices.Contains(rpc.Roles(), role) {
			return "", fmt.Errorf("issue session: %q is no role", role)
		}
	}
	var tenant any
	if tenantID != "" {
		parsed, err := uuid.Parse(tenantID)
		if err != nil {
			return "", errors.New("issue session: the tenant is no id")
		}
		tenant = parsed.String()
	} else if slices.Contains(roles, "tenant") {
		return "", errors.New("issue session: a tenant's person has a tenant")
	}
	id, secret := ids.New(), make([]byte, secretSize)
	if _, err := rand.Read(secret); err != nil {
		return "", fmt.Errorf("issue session: %w", err)
	}
	token := tokenPrefix + strings.ReplaceAll(id, "-", "") + "_" + base64.RawURLEncoding.EncodeToString(secret)
	hash := sha256.Sum256([]byte(token))
	_, err := pg.Exec(ctx, db, newSession, id, hash[:], subject, tenant, roles, ttl, personID)
	if err != nil {
		return "", fmt.Errorf("issue session: %w", err)
	}
	return token, nil
}

// Authenticate implements guard.Authenticator for the people's port.
func (s *Sessions) Authenticate(ctx context.Context, _ string, header http.Header) (rpc.Person, error) {
	session, err := s.FromHeader(ctx, header)
	return session.Person, err
}

// FromHeader returns the session of a request's bearer token. A token that is not valid, for whatever cause, is the
// fault unauthenticated. Only a caller who has the session's whole token learns from the fault that, and when, the
// session expired, was ended or was replaced.
func (s *Sessions) FromHeader(ctx context.Context, header http.Header) (Session, error) {
	values := header.Values("Authorization")
	if len(values) != 1 {
		return Session{}, refused("none, or more than one, authorization was sent")
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return Session{}, refused("the authorization is no bearer token")
	}
	id, err := sessionID(token)
	if err != nil {
		return Session{}, err
	}
	hash := sha256.Sum256([]byte(token))
	session, stored, err := s.read(ctx, id)
	if err != nil {
		return Session{}, err
	}
	if subtle.ConstantTimeCompare(stored, hash[:]) != 1 {
		return Session{}, refused("the secret is wrong")
	}
	if err := session.over(); err != nil {
		return Session{}, err
	}
	return session, nil
}

// Check returns an error unless a session is still alive, and of the same person with the same roles.
func (s *Sessions) Check(ctx context.Context, was Session) error {
	now, _, err := s.read(ctx, was.ID)
	if err != nil {
		return err
	}
	if err := now.over(); err != nil {
		return err
	}
	if now.Person.Subject != was.Person.Subject || now.Person.TenantID != was.Person.TenantID ||
		!slices.Equal(now.Person.Roles, was.Person.Roles) {
		return refused("the person's rights have changed")
	}
	return nil
}

var (
	sweepSessions = pg.Define(pg.RoleReadmodel, "people.sweep_sessions", `
	DELETE FROM readmodel.person_session WHERE session_id IN (
		SELECT session_id FROM readmodel.person_session WHERE LEAST(revoked_at, expires_at) < mesh.clock() - interval '7 days'
			LIMIT 5000)`)
	sweepPeople = pg.Define(pg.RoleReadmodel, "people.sweep_people", `
	DELETE FROM readmodel.person WHERE person_id IN (
		SELECT person_id FROM readmodel.person WHERE LEAST(ended_at, expires_at) < mesh.clock() - $1::interval LIMIT 5000)`)
)

// Sweep deletes sessions that ended more than a week ago, and people who ended more than thirty days ago, some
// thousands per call.
func (s *Sessions) Sweep(ctx context.Context) error {
	if _, err := pg.Exec(ctx, s.db, sweepSessions); err != nil {
		return fmt.Errorf("sweep sessions: %w", err)
	}
	if _, err := pg.Exec(ctx, s.db, sweepPeople, personKept); err != nil {
		return fmt.Errorf("sweep people: %w", err)
	}
	return nil
}

// Recheck returns a channel that fires when this replica has ended sessions of a subject, and a function that releases
// the channel. Watches of other replicas check their session every two seconds.
func (s *Sessions) Recheck(subject string) (<-chan struct{}, func()) {
	fired := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rechecks[subject] == nil {
		s.rechecks[subject] = map[chan struct{}]bool{}
	}
	s.rechecks[subject][fired] = true
	return fired, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.rechecks[subject], fired)
		if len(s.rechecks[subject]) == 0 {
			delete(s.rechecks, subject)
		}
	}
}

// recheck fires the channels of a subject.
func (s *Sessions) recheck(subject string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for fired := range s.rechecks[subject] {
		select {
		case fired <- struct{}{}:
		default: // an earlier signal is still unread
		}
	}
}

type sessionRow struct {
	ID         string     `db:"session_id" expr:"@.session_id::text"`
	Hash       []byte     `db:"token_sha256"`
	Subject    string     `db:"subject"`
	TenantID   string     `db:"tenant_id" expr:"COALESCE(@.tenant_id::text, '')"`
	Roles      []string   `db:"roles"`
	ExpiresAt  time.Time  `db:"expires_at"`
	EndedAt    *time.Time `db:"revoked_at"`
	Expired    bool       `db:"expired" expr:"@.expires_at <= mesh.clock()"`
	ReplacedAt *time.Time `db:"replaced_at" expr:"(SELECT min(n.created_at) FROM readmodel.person_session n WHERE n.person_id = @.person_id AND n.created_at >= @.revoked_at)"`
}

var sessionsByID = pg.Define(pg.RoleReadmodel, "people.sessions_by_id", `
	SELECT `+pg.Columns[sessionRow]("p")+` FROM readmodel.person_session p WHERE p.session_id = ANY($1::uuid[])`)

func (s *Sessions) readRows(ctx context.Context, ids []string) (map[string]sessionRow, error) {
	rows, err := pg.All[sessionRow](ctx, s.db, sessionsByID, ids)
	if err != nil {
		return nil, err
	}
	found := make(map[string]sessionRow, len(rows))
	for _, row := range rows {
		found[row.ID] = row
	}
	return found, nil
}

// read returns a session, which may have ended, and the hash of its token.
func (s *Sessions) read(ctx context.Context, id string) (Session, []byte, error) {
	row, found, err := s.rows.get(ctx, id)
	switch {
	case err != nil && ctx.Err() == nil && (pg.IsConnError(err) || errors.Is(err, context.DeadlineExceeded)):
		return Session{}, nil, databaseAway(err)
	case err != nil:
		return Session{}, nil, fmt.Errorf("read session: %w", err)
	case !found:
		return Session{}, nil, refused("there is no such session")
	}
	return Session{
		ID: id, Person: rpc.Person{Subject: row.Subject, TenantID: row.TenantID, Roles: row.Roles}, ExpiresAt: row.ExpiresAt,
		endedAt: row.EndedAt, expired: row.Expired, replacedAt: row.ReplacedAt,
	}, row.Hash, nil
}

// databaseAway returns the refusal of a call whose session could not be read because of the state of the database. It
// names the database and its repair, since `gpuaas status`, to which the remedy of unavailable leads, is refused too.
func databaseAway(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		err = fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the database does not answer", fault.RetryAfter(time.Second),
			fault.Cause(err))
	}
	away, typed := fault.As(pg.Fault(err))
	if !typed {
		return err
	}
	if away.Remedy == fault.RowOf(away.Reason).Remedy {
		away.Remedy = "bring the database back: without it no command is answered, `gpuaas status` included; agents and " +
			"workloads run on meanwhile"
	}
	return away
}

// over returns the refusal of a session that has ended, with the time and the cause; nil for a live session. A session
// that ended before the same person got another one was replaced, because the end of a person ends all sessions
// together.
func (s Session) over() error {
	const why = "the session is over"
	switch {
	case s.replacedAt != nil:
		return refusedFor("your token was replaced by a newer one at "+s.replacedAt.UTC().Format(time.RFC3339), why,
			"use the newer token, which the repeat of the request that made this one returned; or "+newToken)
	case s.endedAt != nil:
		return refusedAs("your token was ended at "+s.endedAt.UTC().Format(time.RFC3339), why)
	case s.expired:
		return refusedAs("your token expired at "+s.ExpiresAt.UTC().Format(time.RFC3339), why)
	}
	return nil
}

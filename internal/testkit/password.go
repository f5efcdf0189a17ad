package testkit

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// password returns a fixed password: test databases hold no secrets.
func password(role string) string { return "test-" + role }

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// deriveQuickly replaces the verifiers of passwords by ones that a login derives in one iteration, not in 4,096: under
// the race detector these take most of the time of a connection. A wrong password is refused as before.
func deriveQuickly(ctx context.Context, conn execer, passwords map[string]string) error {
	for role, password := range passwords {
		verifier, err := quickVerifier(password)
		if err != nil {
			return fmt.Errorf("derive the password of %s: %w", role, err)
		}
		if _, err := conn.Exec(ctx, "ALTER ROLE "+pgx.Identifier{role}.Sanitize()+" PASSWORD '"+verifier+"'"); err != nil {
			return fmt.Errorf("set the password of %s: %w", role, err)
		}
	}
	return nil
}

// quickVerifier returns the form in which Postgres stores a password (RFC 5803), with one iteration.
func quickVerifier(password string) (string, error) {
	salt := []byte("roles of tests...")
	salted, err := pbkdf2.Key(sha256.New, password, salt, 1, sha256.Size)
	if err != nil {
		return "", err
	}
	mac := func(text string) []byte {
		h := hmac.New(sha256.New, salted)
		_, _ = h.Write([]byte(text)) // a hash never fails
		return h.Sum(nil)
	}
	stored := sha256.Sum256(mac("Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return "SCRAM-SHA-256$1:" + b64(salt) + "$" + b64(stored[:]) + ":" + b64(mac("Server Key")), nil
}

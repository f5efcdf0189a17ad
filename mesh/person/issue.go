package person

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel"
)

// Issue returns the bearer token of a session whose token is stored nowhere else: of a person of a tenant, or of the
// operator if tenantID is empty. databaseURL logs in as readmodel.
func Issue(ctx context.Context, databaseURL, tenantID string, s Session) (string, error) {
	db, err := pg.Open(ctx, pg.Config{URL: databaseURL, ApplicationName: "gpuaas-admit", MaxConns: 1})
	if err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	defer db.Close()
	s.TenantID = tenantID
	token, err := readmodel.AdmitPerson(ctx, db, s.admission())
	if err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	return token, nil
}

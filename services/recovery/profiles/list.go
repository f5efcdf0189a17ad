package profiles

import (
	"context"
	"fmt"
	"strings"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// mostListed is how many versions a list has.
	mostListed = 1000
	// mostWhole is how many versions of one name a list has with their bundles, each of which may have 256 KiB.
	mostWhole = 8
)

// listed is a version with how many nodes reported it last.
type listed struct {
	row
	Nodes int64 `db:"nodes"`
}

// bundles are what a list leaves out of most versions.
type bundles struct {
	ID               string `db:"profile_id" expr:"@.profile_id::text"`
	CABundle         []byte `db:"ca_bundle"`
	RecoveryCABundle []byte `db:"recovery_ca_bundle"`
}

var (
	listVersions = pg.Define(pg.RoleRecovery, "profiles.list", `
		SELECT `+withoutBundles(pg.Columns[row]("p"))+`, (SELECT count(*) `+reporting+`) AS nodes
		FROM recovery.profile p WHERE $1 = '' OR p.name = $1 ORDER BY p.name, p.number DESC LIMIT $2`)

	// readBundles reads those of the active version first.
	readBundles = pg.Define(pg.RoleRecovery, "profiles.read_bundles", `
		SELECT `+pg.Columns[bundles]("p")+` FROM recovery.profile p WHERE p.name = $1 AND p.phase <> 'retired'
		ORDER BY p.phase = 'active' DESC, p.number DESC LIMIT $2`)
)

// withoutBundles has columns of versions be read with empty bundles.
func withoutBundles(columns string) string {
	return strings.NewReplacer("p.ca_bundle", "''::bytea AS ca_bundle",
		"p.recovery_ca_bundle", "''::bytea AS recovery_ca_bundle").Replace(columns)
}

// ListProfiles returns the versions of one name or of all. Bundles are in a list of one name alone, with the active
// version and the newest ones that are not retired: those of a thousand versions would be hundreds of megabytes. The
// fingerprint names a bundle with the rest of the content.
func (s *Server) ListProfiles(ctx context.Context, req *recoveryv1.ListProfilesRequest) (
	*recoveryv1.ListProfilesResponse, error,
) {
	rows, err := pg.All[listed](ctx, s.book.deps.Pool, listVersions, req.GetName(), mostListed)
	if err != nil {
		return nil, fmt.Errorf("list profiles: %w", pg.Fault(err))
	}
	whole := map[string]bundles{}
	if req.GetName() != "" {
		list, err := pg.All[bundles](ctx, s.book.deps.Pool, readBundles, req.GetName(), mostWhole)
		if err != nil {
			return nil, fmt.Errorf("list profiles: %w", pg.Fault(err))
		}
		for _, b := range list {
			whole[b.ID] = b
		}
	}
	out := &recoveryv1.ListProfilesResponse{}
	for i := range rows {
		r := &rows[i]
		r.CABundle, r.RecoveryCABundle = whole[r.ID].CABundle, whole[r.ID].RecoveryCABundle
		version := r.proto(s.book.deps.Default)
		version.Nodes = r.Nodes
		out.Items = append(out.Items, version)
	}
	return out, nil
}

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
	// mostWhole bounds the bundles that a list of one name has, in bytes: each version has two of 256 KiB at most.
	mostWhole = 4 << 20
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

	// readBundles reads those of the active version first, then those of the newest ones.
	readBundles = pg.Define(pg.RoleRecovery, "profiles.read_bundles", `
		SELECT `+pg.Columns[bundles]("p")+` FROM (
			SELECT o.profile_id, o.ca_bundle, o.recovery_ca_bundle, sum(octet_length(o.ca_bundle) +
				octet_length(o.recovery_ca_bundle)) OVER (ORDER BY o.phase = 'active' DESC, o.number DESC) AS size
			FROM recovery.profile o WHERE o.name = $1 AND o.phase <> 'retired') p
		WHERE p.size <= $2 ORDER BY p.size LIMIT $3`)
)

// withoutBundles has columns of versions be read with empty bundles.
func withoutBundles(columns string) string {
	return strings.NewReplacer("p.ca_bundle", "''::bytea AS ca_bundle",
		"p.recovery_ca_bundle", "''::bytea AS recovery_ca_bundle").Replace(columns)
}

// ListProfiles returns the versions of one name or of all. Bundles are in a list of one name alone, with the active
// version and the newest ones that are not retired, up to 4 MiB of them: those of a thousand versions might be hundreds
// of megabytes. The fingerprint names a bundle with the rest of the content.
func (s *Server) ListProfiles(ctx context.Context, req *recoveryv1.ListProfilesRequest) (
	*recoveryv1.ListProfilesResponse, error,
) {
	rows, err := pg.All[listed](ctx, s.book.deps.Pool, listVersions, req.GetName(), mostListed)
	if err != nil {
		return nil, fmt.Errorf("list profiles: %w", pg.Fault(err))
	}
	whole := map[string]bundles{}
	if req.GetName() != "" {
		list, err := pg.All[bundles](ctx, s.book.deps.Pool, readBundles, req.GetName(), mostWhole, mostListed)
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

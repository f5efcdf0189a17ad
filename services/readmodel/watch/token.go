package watch

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

const tokenPrefix = "w1."

// token returns the token that watchers get for a position of the log.
func token(pos int64) string {
	return base64.RawURLEncoding.EncodeToString([]byte(tokenPrefix + strconv.FormatInt(pos, 10)))
}

func parseToken(text string) (int64, error) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return 0, errExpired("it is none of ours")
	}
	digits, ok := strings.CutPrefix(string(raw), tokenPrefix)
	pos, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil || pos < 0 {
		return 0, errExpired("it is none of ours")
	}
	return pos, nil
}

func errExpired(why string) error {
	return fault.New(commonv1.Reason_REASON_RESUME_TOKEN_EXPIRED, "", fault.Cause(fmt.Errorf("resume token: %s", why)))
}

// checkResume refuses a position that is ahead of the projection, one that this log never had (a restored database),
// and one with too much behind it.
func checkResume(ctx context.Context, q pg.Querier, from, to int64, most int) error {
	if from > to {
		return errExpired("it is ahead of the projection")
	}
	known, behind, err := events.Between(ctx, q, from, to, most)
	switch {
	case err != nil:
		return fmt.Errorf("check resume token: %w", err)
	case !known:
		return errExpired("the log has no such position")
	case behind > most:
		return errExpired("too much has happened since")
	}
	return nil
}

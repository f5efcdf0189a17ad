package gateway

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/cors"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// sendLimit is how long the write of one frame of a watch may take.
const sendLimit = 10 * time.Second

type controllerKey struct{}

// preflightLife is how long a browser may cache the answer to a preflight, in seconds. Most browsers cap a longer time.
const preflightLife = "7200"

// Edge returns the middleware of the people's port. It refuses requests that a browser sends for another site, unless
// that site is trusted. Only a trusted site gets the headers by which its pages may read answers, and never with
// credentials of the browser, since the API accepts bearer tokens alone. It also lets a watch bound how long the write
// of a frame takes.
func Edge(trustedOrigins []string) (func(http.Handler) http.Handler, error) {
	protection := http.NewCrossOriginProtection()
	for _, origin := range trustedOrigins {
		if err := protection.AddTrustedOrigin(origin); err != nil {
			return nil, fmt.Errorf("trust origin: %w", err)
		}
	}
	protection.SetDenyHandler(http.HandlerFunc(refuseSite))
	return func(next http.Handler) http.Handler {
		guarded := protection.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Cache-Control", "no-store")
			switch r.URL.Path {
			case readmodelv1connect.QueryServiceWatchProcedure, readmodelv1connect.EscalationServiceEscalateProcedure:
				r = r.WithContext(context.WithValue(r.Context(), controllerKey{}, http.NewResponseController(w)))
			}
			next.ServeHTTP(w, r)
		}))
		return sharing(trustedOrigins, guarded)
	}, nil
}

// sharing adds the CORS headers for trusted sites, and answers their preflights.
func sharing(trusted []string, next http.Handler) http.Handler {
	allowed := strings.Join(append(cors.AllowedHeaders(), "Authorization", rpc.HeaderCorrelationID), ", ")
	exposed := strings.Join(append(cors.ExposedHeaders(), rpc.HeaderCorrelationID), ", ")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Vary", "Origin")
		origin := r.Header.Get("Origin")
		if !slices.Contains(trusted, origin) {
			next.ServeHTTP(w, r)
			return
		}
		h.Set("Access-Control-Allow-Origin", origin)
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			h.Add("Vary", "Access-Control-Request-Method")
			h.Add("Vary", "Access-Control-Request-Headers")
			h.Set("Access-Control-Allow-Methods", http.MethodPost)
			h.Set("Access-Control-Allow-Headers", allowed)
			h.Set("Access-Control-Max-Age", preflightLife)
			w.WriteHeader(http.StatusNoContent)
			return
		}
		h.Set("Access-Control-Expose-Headers", exposed)
		next.ServeHTTP(w, r)
	})
}

// refuseSite writes the typed refusal of a request that a browser sent for a site that is not trusted.
func refuseSite(w http.ResponseWriter, r *http.Request) {
	refusal := fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "a browser sent this for another site",
		fault.Unmet("the site "+r.Header.Get("Origin")+" is not one of trusted_origins"),
		fault.Remedy("to let pages of that site call the API, add its origin, scheme://host[:port], to trusted_origins in "+
			"the configuration of readmodel "+
			"and restart it"))
	// A request of no known protocol, such as a form, gets the answer that a Connect request would get. An error means
	// that the browser has gone.
	_ = connect.NewErrorWriter().Write(w, r, fault.ToConnect(refusal, ids.New()))
}

// bounded returns send with a time limit on each frame. Without the limit a watcher that does not read would block its
// stream and the handler for as long as its connection answers pings.
func bounded(ctx context.Context, send watch.Send) watch.Send {
	controller, ok := ctx.Value(controllerKey{}).(*http.ResponseController)
	if !ok {
		return send
	}
	return func(frame *readmodelv1.WatchResponse) error {
		// A transport without deadlines keeps the stream as it is.
		_ = controller.SetWriteDeadline(time.Now().Add(sendLimit))
		err := send(frame)
		_ = controller.SetWriteDeadline(time.Time{})
		return err
	}
}

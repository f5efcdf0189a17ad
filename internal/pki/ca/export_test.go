package ca

import (
	"net/http"

	"github.com/go-chi/chi/v5"
	"github.com/smallstep/certificates/api"
	"github.com/smallstep/certificates/authority"
)

// Handler returns the HTTP interface of the authority, as a step-ca process has it.
func (e *Embedded) Handler() http.Handler {
	router := chi.NewRouter()
	api.Route(router)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		router.ServeHTTP(w, r.WithContext(authority.NewContext(r.Context(), e.authority)))
	})
}

// ProvisionerFile is the name of the provisioner's key.
const ProvisionerFile = provisionerFile

package kubernetes

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

// authoritySecret holds what all servers of a namespace share: without it none can speak to the Pods of another.
const authoritySecret = "cove-agents"

// authority finds what servers before this one have made, or makes it: of several that start at once, the first wins.
func (d *Driver) authority(ctx context.Context) (*podapi.Authority, error) {
	secret := &corev1.Secret{}
	get := func() error {
		return d.api.core.Get().Namespace(d.cfg.Namespace).Resource("secrets").Name(authoritySecret).Do(ctx).Into(secret)
	}
	err := get()
	if apierrors.IsNotFound(err) {
		if err := d.makeAuthority(ctx); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("make the Secret %s: %w", authoritySecret, err)
		}
		err = get()
	}
	if err != nil {
		return nil, fmt.Errorf("read the Secret %s: %w", authoritySecret, err)
	}
	return podapi.LoadAuthority(secret.Data["ca.crt"], secret.Data["ca.key"])
}

func (d *Driver) makeAuthority(ctx context.Context) error {
	made, err := podapi.NewAuthority()
	if err != nil {
		return err
	}
	key, err := made.Key()
	if err != nil {
		return err
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: authoritySecret, Namespace: d.cfg.Namespace, Labels: map[string]string{labelManaged: managedBy}},
		Data:       map[string][]byte{"ca.crt": made.Certificate, "ca.key": key}, // DER
	}
	return d.api.core.Post().Namespace(d.cfg.Namespace).Resource("secrets").Body(secret).Do(ctx).Error()
}

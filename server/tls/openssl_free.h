// SPDX-License-Identifier: Apache-2.0
//
// Owners of OpenSSL's objects, each with the function that frees its kind.

#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>

namespace attend {

template <auto kFree>
struct Freer {
  template <class T>
  void operator()(T* owned) const {
    kFree(owned);
  }
};
using Bio = std::unique_ptr<BIO, Freer<BIO_free>>;
using Certificate = std::unique_ptr<X509, Freer<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;

// For what reads PEM: nobody is there to type a password.
inline int NoPassword(char*, int, int, void*) { return -1; }

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Owning pointers to OpenSSL objects, each with the right free function.

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

// A PEM password callback that refuses, because a server cannot prompt.
inline int NoPassword(char*, int, int, void*) { return -1; }

}  // namespace attend

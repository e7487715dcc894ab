<prompt schema="shop-code">
  <stock.py/>
  <user>Write a function that lists the articles of which fewer than five are left.</user>
</prompt>

<prompt schema="shop-code">
  <stock.py/><prices.py/>
  <user>Write a function that gives the gross value of everything in stock.</user>
</prompt>

<prompt schema="shop-code">
  <stock.py/><prices.py/><orders.py/>
  <user>Write a function that picks an order and answers its total, or None if something is missing.</user>
</prompt>
